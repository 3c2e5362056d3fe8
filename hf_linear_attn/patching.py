"""`patch_model` and `unpatch_model`: in place, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import feature_maps, mechanisms  # noqa: F401  (their import fills the registries)
from .config import DEFAULT_ATTENTION, LayerConfig, LinearAttentionConfig
from .integration import attention
from .integration.attention import CAUSAL, EXACT, IMPLEMENTATION, NAME, OBSERVER, SUBMODULE, before_attention
from .integration.boundaries import unwatch, watch
from .integration.configs import configs_of, own_configs
from .integration.discovery import (
    AttentionLayer,
    attention_shape,
    find_attention,
    foreign_attention,
    longest_input,
    self_attention,
)
from .integration.model_class import (
    AUTO_MAP_MARK,
    auto_map,
    base_class,
    linear_attention_class,
    shared_parameters,
)
from .integration.positions import (
    PositionChange,
    check_max_length,
    forget_extension,
    plan_extension,
    plan_restoration,
    position_limit,
    remedy,
)
from .mechanisms.base import LinearAttention
from .mechanisms.softmax import EXACT as SOFTMAX
from .registry import ATTENTIONS, AttentionEntry, build_options

attention.register()

#: Names of the fields that a patched model's config carries into `config.json`.
CONFIG_FIELD = "linear_attention"
IMPLEMENTATION_FIELD = "attn_implementation"

#: The remedy where nothing is left to patch.
LEFT_EXACT = (
    "Sliding windows become full attention, which can be patched, if the config says so before the model is loaded "
    "(sliding_window=None, or 'full_attention' in layer_types)."
)


def patch_model(
    model: PreTrainedModel,
    attention: str | Mapping[str, Any] | LinearAttentionConfig = DEFAULT_ATTENTION,
    *,
    layers: Sequence[int] | None = None,
    max_length: int | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Replace self-attention by a linear-time mechanism, in place, and return the model.

    The model stays what it was: same class name, same `generate`, `pipeline`, `Trainer`, `save_pretrained`. The learned
    parts live in a submodule `linear_attention` of each attention module. Cross-attention, and layers that attend to a
    sliding window only, stay exact.

    Args:
        model: any `PreTrainedModel` whose attention goes through Transformers' attention interface.
        attention: a registered name (see `list_attentions()`), a dict per layer such as
            `{"default": "hedgehog", "0": "softmax", "-1": "softmax"}` (values may be dicts with options, keys may be
            indices, module names or patterns on them), or a `LinearAttentionConfig`.
        layers: with a name, the indices of the self-attention layers to patch (all by default; negative ones count
            from the end).
        max_length: the longest input in tokens. Learned positions are extended to it as `extend_positions` does
            (`how="tile"`; `unpatch_model` takes the new ones away again), and mechanisms that are built for a largest
            length (Linformer, cosFormer) get it as their option `max_length` where they have none of their own.
        options: with a name, the mechanism's options, e.g. `num_features=256, seed=0`.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or a value has the wrong type.
        ValueError: unknown mechanism or option, layer out of range, nothing to patch, already patched, a `max_length`
            that would change nothing.
        NotImplementedError: the architecture, a layer, or the direction cannot be served. Nothing is changed then.
    """
    check_model(model)
    if is_patched(model):
        raise ValueError(
            f"This {type(model).__name__} is already patched ({_summary(model)}). Call unpatch_model(model) first."
        )
    config = LinearAttentionConfig.parse(attention, layers, options)
    longest, positions = longest_input(model), PositionChange()
    if max_length is not None:
        positions = _positions(model, config, max_length)
        config = config.with_default("max_length", max_length)
        longest = None if longest is None else longest + positions.added
    planned = _plan(model, config)
    built = [(layer, settings, _build(model, layer, index, settings, longest)) for index, layer, settings in planned]
    modules = [(layer, module) for layer, _, module in built]
    _share([module for _, module in modules])
    _apply(model, modules, _resolved(built, planned), auto_map(model), positions)
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Take linear attention out again, in place: outputs are bit-equal to those before `patch_model`.

    The learned parts are dropped, and so are positions that `patch_model(…, max_length=)` has added. Raises a
    ValueError if the model is not patched.
    """
    check_model(model)
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched.")
    positions = plan_restoration(model)
    implementations = {}
    for module in model.modules():
        unwatch(module)
        implementation = getattr(module, EXACT, None)
        if implementation is None:
            continue
        implementations[id(getattr(module, "config", None))] = implementation
        if hasattr(module, SUBMODULE):
            delattr(module, SUBMODULE)
        delattr(module, EXACT)
        for mark in (NAME, CAUSAL, OBSERVER):
            vars(module).pop(mark, None)
        _remove_hook(module)
    positions.apply(model)
    forget_extension(model)
    for config in configs_of(model):
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation_internal = implementations.get(id(config), _any(implementations))
    model.all_tied_weights_keys = {
        name: source for name, source in model.all_tied_weights_keys.items() if f".{SUBMODULE}." not in f".{name}"
    }
    for name in (CONFIG_FIELD, IMPLEMENTATION_FIELD):
        if name in vars(model.config):
            delattr(model.config, name)
    if getattr(model.config, "auto_map", None) and AUTO_MAP_MARK in str(model.config.auto_map):
        del model.config.auto_map
    model.__class__ = base_class(type(model))
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` has been applied to this model."""
    return any(getattr(module, EXACT, None) is not None for module in model.modules())


def check_model(model: object) -> None:
    """Raise a TypeError, with the remedy, unless `model` is a `PreTrainedModel`."""
    if isinstance(model, PreTrainedModel):
        return
    if isinstance(model, str):
        remedy = "Load it first, for example with AutoModel.from_pretrained(name)."
    elif type(model).__module__.partition(".")[0] == "peft":
        remedy = "Patch the base model before wrapping it with PEFT, or pass model.get_base_model()."
    elif isinstance(model, nn.Module) and any(isinstance(part, PreTrainedModel) for part in model.modules()):
        remedy = "Pass the Transformers model inside it."
    else:
        remedy = "Pass a model loaded with from_pretrained()."
    raise TypeError(f"Expected a transformers.PreTrainedModel, got {type(model).__name__}. {remedy}")


# --------------------------------------------------------------------------------------------------------------------
# Planning


def _plan(model: PreTrainedModel, config: LinearAttentionConfig) -> list[tuple[int, AttentionLayer, LayerConfig]]:
    """The layers to patch, checked: nothing is built or changed yet."""
    found = self_attention(model)
    resolved = config.resolve([layer.name for layer in found])
    named = set(config.layers)
    planned = []
    skipped = []
    for index, (layer, settings) in enumerate(zip(found, resolved, strict=True)):
        if settings is None or settings.attention == SOFTMAX:
            continue
        asked = settings is not config.default and bool(named)
        if layer.span != "full":
            if asked:
                raise NotImplementedError(
                    f"Layer {index} ({layer.name}) attends to a part of the sequence only ({layer.span}); it is not "
                    "quadratic and stays exact. Leave it out."
                )
            skipped.append(f"{index} ({layer.span})")
            continue
        if layer.obstacle:
            raise NotImplementedError(
                f"Layer {index} ({layer.name}, {type(layer.module).__name__}) {layer.obstacle}. "
                f"{type(model).__name__} cannot be patched there; give the layer 'softmax'."
            )
        _check_direction(ATTENTIONS.get(settings.attention), layer, index)
        planned.append((index, layer, settings))
    if not planned:
        reason = " Every layer is 'softmax'."
        if skipped:
            reason = f" Left exact: {', '.join(skipped)}: only layers of full attention are replaced. {LEFT_EXACT}"
        raise ValueError(f"Nothing to patch in {type(model).__name__} ({len(found)} self-attention layers).{reason}")
    foreign = foreign_attention(model, {id(layer.config) for _, layer, _ in planned})
    if foreign:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be patched: {foreign} computes its attention outside Transformers' "
            "attention interface, from masks that it shares with the layers to patch. It would need to call "
            "ALL_ATTENTION_FUNCTIONS."
        )
    return planned


def _check_direction(entry: AttentionEntry, layer: AttentionLayer, index: int) -> None:
    if entry.causal if layer.causal else entry.bidirectional:
        return
    direction = "causal" if layer.causal else "bidirectional"
    alternative = f" Use {entry.alternative!r}." if entry.alternative else ""
    raise NotImplementedError(
        f"{entry.name!r} cannot be {direction}, and layer {index} ({layer.name}) is.{alternative}"
    )


def _positions(model: PreTrainedModel, config: LinearAttentionConfig, max_length: int) -> PositionChange:
    """What extends the model to `max_length`. Raises a ValueError where that would change nothing at all."""
    limit = position_limit(model)
    if check_max_length(max_length) > (limit or max_length):
        return plan_extension(model, max_length)
    if max_length != limit and not config.has_option("max_length"):
        reason = f"its {remedy(model)}" if limit is None else f"it takes {limit} already"
        raise ValueError(
            f"max_length={max_length} would change nothing: no mechanism given has an option 'max_length', and this "
            f"{type(model).__name__} has no positions to extend to {max_length} tokens ({reason}). Leave it out."
        )
    return PositionChange()


def _build(
    model: PreTrainedModel, layer: AttentionLayer, index: int, settings: LayerConfig, longest: int | None
) -> LinearAttention:
    entry = ATTENTIONS.get(settings.attention)
    shape = attention_shape(layer, index, longest)
    options = build_options(entry, dict(settings.options))
    options = entry.resolve_options(shape, options)
    module = entry.factory(shape, options)
    weights = [tensor for tensor in layer.module.parameters() if tensor.is_floating_point()]
    place = next((tensor for tensor in weights if tensor.dtype.itemsize > 1), next(model.parameters(), None))
    if place is not None and place.device.type != "meta":
        module.to(device=place.device)
    if place is not None and place.dtype.itemsize > 1:
        module.to(dtype=place.dtype)
    return module.train(model.training)


def _resolved(
    built: list[tuple[AttentionLayer, LayerConfig, LinearAttention]],
    planned: list[tuple[int, AttentionLayer, LayerConfig]],
) -> dict[str, Any]:
    """The saved form: every patched layer by index, with all of its options written out."""
    layers = {
        str(index): LayerConfig(settings.attention, asdict(module.options))
        for (index, _, settings), (_, _, module) in zip(planned, built, strict=True)
    }
    return LinearAttentionConfig(None, layers).to_dict()


# --------------------------------------------------------------------------------------------------------------------
# Applying: only assignments, nothing that can fail half-way


def _apply(
    model: PreTrainedModel,
    built: list[tuple[AttentionLayer, LinearAttention]],
    saved: dict[str, Any],
    classes: dict[str, str],
    positions: PositionChange,
) -> None:
    own_configs(model)
    positions.apply(model, record=True)
    modules = {id(layer.module): module for layer, module in built}
    owners = {id(layer.config) for layer, _ in built}
    # Every module that reads one of these configs goes through our function from now on, exact ones too.
    ours = [layer for layer in find_attention(model) if id(layer.config) in owners]
    watch(model, [layer for layer in ours if not layer.cross])
    for layer in ours:
        setattr(layer.module, EXACT, layer.config._attn_implementation or "eager")
        setattr(layer.module, NAME, layer.name)
        setattr(layer.module, OBSERVER, None)
        if id(layer.module) in modules:
            layer.module.add_module(SUBMODULE, modules[id(layer.module)])
        if not layer.cross:
            setattr(layer.module, CAUSAL, layer.causal)
            layer.module.register_forward_pre_hook(before_attention, with_kwargs=True)
    for config in configs_of(model):
        if id(config) in owners:
            config._attn_implementation_internal = IMPLEMENTATION
    setattr(model.config, CONFIG_FIELD, saved)
    setattr(model.config, IMPLEMENTATION_FIELD, IMPLEMENTATION)
    if classes:
        model.config.auto_map = classes
    model.__class__ = linear_attention_class(base_class(type(model)))
    model.all_tied_weights_keys = {**model.all_tied_weights_keys, **shared_parameters(model)}


def _share(modules: Sequence[LinearAttention]) -> None:
    """Let mechanisms that share parameters across layers take those of the first layer of their kind."""
    first: dict[tuple[type, str], LinearAttention] = {}
    for module in modules:
        owner = first.setdefault((type(module), repr(module.options)), module)
        if owner is not module:
            module.share_with(owner)


def _any(implementations: dict[int, str]) -> str:
    return next(iter(implementations.values()))


def _remove_hook(module: nn.Module) -> None:
    for number, hook in list(module._forward_pre_hooks.items()):
        if hook is before_attention:
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


# --------------------------------------------------------------------------------------------------------------------
# Report


@dataclass(frozen=True)
class LayerReport:
    """One self-attention layer. state_bytes: of one token stream after 1,024 tokens (0: no state)."""

    index: int
    name: str
    attention: str
    options: dict[str, Any]
    parameters: int
    state_bytes: int
    state: str


@dataclass(frozen=True)
class PatchReport:
    """What was patched, with what, at which cost. `print(report)` shows it as a table."""

    model: str
    layers: tuple[LayerReport, ...]

    @property
    def parameters(self) -> int:
        """Parameters added."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one token stream, all patched layers together (after 1,024 tokens if they grow)."""
        return sum(layer.state_bytes for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [5])
        kind = max([len(layer.attention) for layer in self.layers] + [9])
        lines = [
            f"{self.model}: {sum(layer.attention != SOFTMAX for layer in self.layers)} of {len(self.layers)} "
            f"self-attention layers are linear, {self.parameters:,} parameters added"
        ]
        lines.append(f"{'':>5}  {'layer':<{width}}  {'attention':<{kind}}  {'parameters':>10}  {'state bytes':>11}")
        for layer in self.layers:
            size = "cache" if layer.attention == SOFTMAX and layer.state != "none" else f"{layer.state_bytes:,}"
            note = " (growing)" if layer.state == "growing" and layer.attention != SOFTMAX else ""
            lines.append(
                f"{layer.index:>5}  {layer.name:<{width}}  {layer.attention:<{kind}}  {layer.parameters:>10,}  "
                f"{size:>11}{note}"
            )
        return "\n".join(lines)


def patch_report(model: PreTrainedModel) -> PatchReport:
    """What `patch_model` did to this model. Raises a ValueError if it is not patched.

    State sizes are in bytes for one token stream (batch of one); growing states are given after 1,024 tokens.
    """
    check_model(model)
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")
    saved = getattr(model.config, CONFIG_FIELD)["layers"]
    rows = []
    for index, layer in enumerate(self_attention(model)):
        settings = saved.get(str(index))
        module = getattr(layer.module, SUBMODULE, None)
        if settings is None or module is None:
            rows.append(LayerReport(index, layer.name, SOFTMAX, {}, 0, 0, "growing" if layer.causal else "none"))
            continue
        entry = ATTENTIONS.get(settings["attention"])
        causal_bytes = module.state_bytes(1024) if layer.causal else 0
        rows.append(
            LayerReport(
                index,
                layer.name,
                entry.name,
                dict(settings["options"]),
                module.learned_parameters(),
                causal_bytes,
                entry.state if layer.causal else "none",
            )
        )
    return PatchReport(base_class(type(model)).__name__, tuple(rows))


def _summary(model: PreTrainedModel) -> str:
    saved = getattr(model.config, CONFIG_FIELD, None) or {"layers": {}}
    names = sorted({layer["attention"] for layer in saved["layers"].values()})
    return f"{', '.join(names)} in {len(saved['layers'])} layers"
