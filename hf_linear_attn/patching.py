"""`patch_model` and `unpatch_model`: in place, all or nothing."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .config import DEFAULT_ATTENTION, LinearAttentionConfig
from .integration.context import SUBMODULE, in_memory, mechanism_of
from .integration.discovery import installed_layers, self_attention
from .integration.model_class import install, name_patched, uninstall
from .integration.models import base_class, check_exact, check_patched, has_adapter, outermost_models
from .integration.positions import PositionChange, plan_length, plan_restoration
from .mechanisms.head_mixture import linear_mechanism
from .mechanisms.softmax import EXACT
from .mechanisms.window import is_unfitted
from .registry import ATTENTIONS

logger = logging.getLogger(__name__)


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
        model: Any `PreTrainedModel` whose attention goes through Transformers' attention interface.
        attention: A registered name (see `list_attentions()`), a dict per layer such as
            `{"default": "hedgehog", "0": "softmax", "-1": "softmax"}` (values may be dicts with options, keys may be
            indices, module names or patterns on them), or a `LinearAttentionConfig`. A layer may keep exact attention
            in some of its key-value heads: `{"default": "window", "14": {"exact_heads": [1]}}`.
        layers: With a name, the indices of the self-attention layers to patch (all by default; negative ones count
            from the end).
        max_length: The longest input in tokens. Learned positions are extended to it as `extend_positions` does
            (`how="tile"`; `unpatch_model` removes the new ones again), and mechanisms that are built for a largest
            length (Linformer, cosFormer) get it as their option `max_length` where they have none of their own. What
            truncates inputs has limits of its own: set `tokenizer.model_max_length`, and `max_seq_length` of a
            SentenceTransformer.
        options: With a name, the mechanism's options, e.g. `num_features=256, seed=0`, and `exact_heads`, the
            key-value heads that stay exact in every layer patched.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or a value has the wrong type.
        ValueError: An unknown mechanism or option, a layer out of range, nothing to patch, a model that is patched
            already, or a `max_length` that would change nothing.
        NotImplementedError: The architecture, a layer, or the direction cannot be served. Nothing is changed then.
    """
    check_exact(model)
    config = LinearAttentionConfig.parse(attention, layers, options)
    roots = outermost_models(model)
    positions = PositionChange()
    if max_length is not None:
        config, positions = plan_length(model, config, max_length, roots)
    install(model, config, roots, positions)
    for root in roots:
        name_patched(root)
        if has_adapter(root):
            logger.warning(
                f"This {type(root).__name__} has an adapter already, whose file will hold neither {SUBMODULE!r} nor "
                "that its base is patched: loaded again, it would run on the exact model. Patch the model before "
                f"get_peft_model, with {SUBMODULE!r} in modules_to_save, or merge the adapter and save the model."
            )
    if positions.added and "sentence_transformers" in sys.modules:
        logger.warning(
            f"The positions of this {type(model).__name__} go up to {max_length} tokens now. A SentenceTransformer "
            f"around it still truncates at its own limit: set encoder.max_seq_length = {max_length}."
        )
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Remove linear attention, in place, and return the model: outputs are bit-equal to those before `patch_model`.

    The learned parts are dropped, and so are positions that `patch_model(…, max_length=)` has added.

    Raises:
        TypeError: `model` is no `PreTrainedModel`.
        ValueError: The model is not patched.
    """
    check_patched(model)
    positions = plan_restoration(model)
    uninstall(model)
    positions.apply(model)
    return model


# --------------------------------------------------------------------------------------------------------------- Report


@dataclass(frozen=True)
class LayerReport:
    """One self-attention layer of a patched model.

    Attributes:
        index: Its index among the self-attention layers.
        name: Its name in the model.
        attention: The name of its mechanism; "softmax" where it is exact.
        options: The options of the mechanism.
        parameters: The number of parameters added.
        state_bytes: Bytes of the state of one token stream after 1,024 tokens, of a model in float32 (0: no state).
        state: "constant", "growing" or "none".
        exact_heads: The key-value heads of the layer that stay exact.
    """

    index: int
    name: str
    attention: str
    options: dict[str, Any]
    parameters: int
    state_bytes: int
    state: str
    exact_heads: tuple[int, ...] = ()

    @property
    def description(self) -> str:
        """The mechanism with its exact heads: `"window, exact heads 1 3"`."""
        heads = " ".join(str(head) for head in self.exact_heads)
        return f"{self.attention}, exact heads {heads}" if heads else self.attention


@dataclass(frozen=True)
class PatchReport:
    """What was patched, with what, at which cost; `print(report)` shows it as a table.

    Attributes:
        model: The class of the model.
        layers: All self-attention layers.
        unfitted: The layers in which nothing outside of the window is attended to until `calibrate` fits that part.
        windows_only: Those in which nothing outside of it ever is: their model's positions have no far form.
    """

    model: str
    layers: tuple[LayerReport, ...]
    unfitted: tuple[int, ...] = ()
    windows_only: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters added."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one token stream, all patched layers together (after 1,024 tokens if they grow)."""
        return sum(layer.state_bytes for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [5])
        names = [layer.description for layer in self.layers]
        kind = max([len(name) for name in names] + [9])
        lines = [
            f"{self.model}: {sum(layer.attention != EXACT for layer in self.layers)} of {len(self.layers)} "
            f"self-attention layers are linear, {self.parameters:,} parameters added"
        ]
        lines.append(f"{'':>5}  {'layer':<{width}}  {'attention':<{kind}}  {'parameters':>10}  {'state bytes':>11}")
        for layer, name in zip(self.layers, names, strict=True):
            in_cache = layer.attention == EXACT and layer.state == "growing" and not layer.state_bytes
            size = "cache" if in_cache else f"{layer.state_bytes:,}"
            note = " (growing)" if layer.state == "growing" and not in_cache else ""
            lines.append(
                f"{layer.index:>5}  {layer.name:<{width}}  {name:<{kind}}  {layer.parameters:>10,}  {size:>11}{note}"
            )
        if self.unfitted:
            lines.append(
                f"In {len(self.unfitted)} layers nothing is attended to outside of the window yet: calibrate(model, "
                "batches) fits that part to some thousand tokens of text, without training."
            )
        if self.windows_only:
            lines.append(
                f"In {len(self.windows_only)} layers nothing is attended to outside of the window and its sinks: the "
                "positions of the model change at every distance, and no sums over far tokens have them."
            )
        return "\n".join(lines)


def patch_report(model: PreTrainedModel) -> PatchReport:
    """Report what `patch_model` did to this model.

    State sizes are in bytes for one token stream (batch of one); growing states are those after 1,024 tokens.

    Raises:
        TypeError: `model` is no `PreTrainedModel`.
        ValueError: The model is not patched.
    """
    check_patched(model)
    installed = installed_layers(model)
    rows, unfitted, windows_only = [], [], []
    for index, layer in enumerate(self_attention(model)):
        config = installed.get(index)
        if config is None:
            rows.append(LayerReport(index, layer.name, EXACT, {}, 0, 0, "growing" if layer.causal else "none"))
            continue
        mechanism = mechanism_of(layer.module)
        state_bytes, state = 0, "none"
        if layer.causal:
            with in_memory(mechanism):
                state_bytes = mechanism.state_bytes(1024)
            state = "growing" if config.exact_heads else ATTENTIONS.get(config.attention).state
        facts = config.attention, dict(config.options), mechanism.learned_parameters(), state_bytes, state
        rows.append(LayerReport(index, layer.name, *facts, config.exact_heads))
        if is_unfitted(linear_mechanism(mechanism)):
            unfitted.append(index)
        if mechanism.shape.endless_positions:
            windows_only.append(index)
    return PatchReport(base_class(type(model)).__name__, tuple(rows), tuple(unfitted), tuple(windows_only))
