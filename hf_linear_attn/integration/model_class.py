"""The class of a patched model: the original class, with loading, saving and caches that know of linear attention.

A patched model gets a subclass made on the fly, of the same name and module, so that it still is a `BertModel` for
`isinstance`, for `config.architectures`, for pipelines and for the Trainer. `from_pretrained` on that class builds the
linear attention before the weights are read, so every option of `from_pretrained` works.
"""

import copy
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import CONFIG_NAME

from ..config import CONFIG_FIELD, LinearAttentionConfig, saved_settings
from ..mechanisms.base import LinearAttention
from ..utils.files import atomic_write
from .cache import holds_state, replace_static_layers, self_attention_cache, state_layer
from .context import (
    CODE_MODULE,
    IMPLEMENTATION,
    IMPLEMENTATION_FIELD,
    SUBMODULE,
    attention_modules,
    forward_context,
    is_learned,
    is_patched,
    layer_context,
)
from .discovery import installed_layers, layer_index, patched_layers
from .install import install_layers, plan_layers, remove_layers
from .models import (
    ORIGINAL_CLASS,
    base_class,
    checkpoints_gradients,
    models_around,
    outermost_models,
    unshare_configs,
    weight_write_errors,
)
from .positions import PositionChange
from .sentence_encoders import restore_trust, trust_own_checkpoints, write_sentence_cards
from .tensor_parallel import tensor_parallel_plan
from .trial import check_architecture

#: The small module that is written beside the weights, and that `auto_map` points at.
CODE_FILE = f"{CODE_MODULE}.py"

CODE = '''"""Loads this checkpoint with its linear attention. Written by hf-linear-attn."""

from hf_linear_attn.checkpoints import class_by_name


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return class_by_name(name)
'''

#: The text with which every way of building an exact model from a patched checkpoint is refused, with or without this
#: package, and the fields of `config.json` that hold it. `from_pretrained` reads the first one (a table of fusions by
#: name: an unknown one is an error), and so does a model that is built from the config, whatever attention it is asked
#: for, with the second one (an unknown implementation is an error). Our classes take them out before they build.
REFUSAL = (
    "This checkpoint runs linear attention. Load it with hf_linear_attn.load_pretrained(path), or with an AutoModel "
    "class and trust_remote_code=True; both need the package (pip install hf-linear-attn). An AutoPeftModel class "
    "loads it with trust_remote_code=True if the config of the adapter has a task_type."
)
FUSION_FIELD = "fusion_config"
EXPERTS_FIELD = "experts_implementation"
REFUSALS = {FUSION_FIELD: {REFUSAL: True}, EXPERTS_FIELD: REFUSAL}

#: What `patch_model` adds to the name that PEFT saves as that of an adapter's base model, which is no plain checkpoint.
#: An error of Transformers that looks for such a checkpoint repeats it.
PATCHED_NAME = (
    " patched by hf_linear_attn: this base of an adapter was patched in memory, and the adapter does not hold it. Load "
    "the base from where it was saved with hf_linear_attn.load_pretrained(path), or patch it again in the same way, "
    "and call PeftModel.from_pretrained(base, adapter)"
)


logger = logging.getLogger(__name__)


class MismatchedSizesError(ValueError, RuntimeError):
    """The weights have other sizes than the model: a RuntimeError in Transformers, whose callers may catch that."""


class LinearAttentionModelMixin:
    """What a patched model does differently. Never instantiated by itself."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        remove_refusals(config)
        saved = saved_settings(config)
        if saved is not None and config._attn_implementation == IMPLEMENTATION:
            config = copy.deepcopy(config)  # A patched model may run with it.
            config._attn_implementation = None  # the exact layers' own choice, made by the base class
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.__class__ = base_class(type(self))
        if saved is not None:
            is_loading = any(tensor.is_meta for tensor in self.parameters())  # type: ignore[attr-defined]
            layers = LinearAttentionConfig.parse(saved)
            install(self, layers, [self], is_loading=is_loading)  # type: ignore[arg-type,list-item]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model as Transformers does, and refuse a checkpoint whose weights do not match its linear attention.

        Weights are read from safetensors only, unless `use_safetensors=False` asks for another format. Raises as
        `check_loading`, and a ValueError where the weights are corrupt.
        """
        if pretrained_model_name_or_path is not None:
            kwargs.setdefault("use_safetensors", True)
            check_index(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        if isinstance(kwargs.get("config"), PretrainedConfig):
            kwargs["config"] = copy.deepcopy(kwargs["config"])
            remove_refusals(kwargs["config"])
        elif kwargs.get(FUSION_FIELD) is None:
            kwargs[FUSION_FIELD] = {}  # in the config that will be read
        try:
            # Mismatched sizes are reported by `check_loading`, which can say what they mean.
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"The weights in {str(pretrained_model_name_or_path)!r} cannot be read ({error}): a file is truncated "
                "or corrupt. Copy or download the checkpoint again."
            ) from error
        if (folder := downloaded_folder(pretrained_model_name_or_path, **kwargs)) is not None:
            check_index(folder)
        check_loading(pretrained_model_name_or_path, info, ignore_mismatched_sizes)
        check_architecture(model, [*patched_layers(model).values()])
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model as Transformers does, with the small module that `trust_remote_code=True` runs.

        The saved config refuses every other way of loading (see `REFUSALS`).

        Raises:
            NotImplementedError: The model was quantized in memory, which its config does not know.
        """
        model: Any = self
        if not is_patched(model):  # Its patched part was replaced by another one.
            become_exact(model)
            model.save_pretrained(save_directory, *args, **kwargs)
            return
        if kwargs.get("state_dict") is None:
            check_quantization(model)
        become_patched(model)  # A patched part may have come in.
        with own_fields(model), weight_write_errors(save_directory):
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        write_sentence_cards(model)
        trust_own_checkpoints(model)  # of an encoder that was built around the patched model
        is_main = kwargs.get("is_main_process", args[0] if args else True)
        if self.should_save_on_this_rank(is_main):  # type: ignore[attr-defined]
            complete_checkpoint(Path(save_directory))

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        complete_checkpoint(Path(working_dir))  # `save_pretrained(push_to_hub=True)` uploads before it returns.
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Raise a ValueError: another implementation would silently bring softmax attention back."""
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"set_attn_implementation({attn_implementation!r}): this model runs linear attention. Call "
                "unpatch_model(model) first; to choose how exact layers are computed, load the model with "
                "attn_implementation= before patching."
            )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Raise a NotImplementedError: this is the entry of `generate_batch` and of servers that batch continuously."""
        raise NotImplementedError(
            "Continuous batching keeps the keys and values of each token in pages of memory; a model with linear "
            "attention has a recurrent state instead. Use hf_linear_attn.serving.Engine(model, tokenizer), whose batch "
            "changes while it runs; generate(), with prompts of several lengths as a padded batch; or "
            "unpatch_model(model)."
        )

    @property
    def name_or_path(self) -> str:
        """The checkpoint that the model was loaded from. (PEFT goes by the attribute that lies below.)"""
        return str(vars(self)["name_or_path"]).removesuffix(PATCHED_NAME)

    @name_or_path.setter
    def name_or_path(self, value: str) -> None:
        vars(self)["name_or_path"] = value

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        if prepared[0].use_cache and checkpoints_gradients(self):  # type: ignore[arg-type]
            logger.warning_once(  # type: ignore[attr-defined]
                f"This {type(self).__name__} is in training mode with gradient checkpointing, which keeps a cache from "
                "its layers. It generates without one, which is slow: call model.eval() before generate()."
            )
            prepared[0].use_cache = False
        if prepared[0].output_attentions:
            # For timestamps of tokens Whisper has set eager attention, which returns weights. So does ours.
            for module in self.modules():  # type: ignore[attr-defined]
                if layer_context(module) is not None:
                    module.config._attn_implementation_internal = IMPLEMENTATION
        return prepared

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        cache = self_attention_cache(model_kwargs.values())
        if cache is None:
            return prepared
        mask = model_kwargs.get("attention_mask")
        seen = int(cache.get_seq_length())
        # Transformers drops a mask of ones, of which it remembers the length.
        length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]
        if seen and not self.config.is_encoder_decoder and length is not None and length <= seen:
            raise ValueError(  # Transformers would read the input again, after the cache.
                f"The cache holds {seen} tokens, and the input has {length}: no token is left to continue from. Pass "
                "all tokens, at least one of which is not in the cache: fill it without the last token of a prompt "
                "that is to be continued as it is."
            )
        for module in attention_modules(self):  # type: ignore[arg-type]
            context = layer_context(module)
            index = layer_index(module)
            if context is None or not context.causal or index is None:
                continue
            if context.runs_exactly:  # It needs keys and values, and masks of no more tokens than there are.
                replace_static_layers(cache, self.config)
            else:
                state_layer(cache, index)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        return prepared

    def get_expanded_tied_weights_keys(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Return Transformers' tied weights, with the parameters that layers of linear attention share."""
        tied = super().get_expanded_tied_weights_keys(*args, **kwargs)  # type: ignore[misc]
        return {**tied, **shared_parameters(self)}  # type: ignore[arg-type]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: `save_pretrained` writes `auto_map` and the code file."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class cannot be imported by its name: we pickle the original class and make ours again.
        return _empty_instance, (base_class(type(self)),), self.__dict__


class WhisperMixin:
    """What a patched Whisper does differently beside that: it times tokens by weights of its cross-attention alone."""

    def generate(self, *args: Any, return_token_timestamps: bool | None = None, **kwargs: Any) -> Any:
        """Generate as Transformers does. With `return_token_timestamps` no weights of self-attention are given."""
        before = forward_context.only_cross_weights
        forward_context.only_cross_weights = bool(return_token_timestamps)
        try:
            return super().generate(*args, return_token_timestamps=return_token_timestamps, **kwargs)  # type: ignore[misc]
        finally:
            forward_context.only_cross_weights = before

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Transformers would split the keys and values of the cache by rows. The outputs are without one instead.
        if isinstance(seek_outputs, dict) and holds_state(seek_outputs.values()):
            others = {name: value for name, value in seek_outputs.items() if not isinstance(value, Cache)}
            seek_outputs = type(seek_outputs)(**others)
        return super()._postprocess_outputs(seek_outputs, *args, **kwargs)  # type: ignore[misc]


def shared_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Return, for each parameter that a linear attention shares, the name of the one that is saved for it."""
    owners: dict[int, str] = {}
    shared = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, LinearAttention):
            continue
        for parameter_name, parameter in module.named_parameters():
            name = f"{module_name}.{parameter_name}"
            if parameter_name in module.tied_parameters and id(parameter) in owners:
                shared[name] = owners[id(parameter)]
            else:  # The module's own, or no longer tied: PEFT trains copies.
                owners[id(parameter)] = name
    return shared


def _empty_instance(base: type) -> Any:
    return object.__new__(linear_attention_class(base))


@functools.cache
def linear_attention_class(cls: type) -> type:
    """Return the patched counterpart of a model class; a class that is patched already is returned as it is."""
    if issubclass(cls, LinearAttentionModelMixin):
        return cls
    attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases: tuple[type, ...] = (LinearAttentionModelMixin, cls)
    if hasattr(cls, "_extract_token_timestamps"):
        bases = (LinearAttentionModelMixin, WhisperMixin, cls)
    return type(cls.__name__, bases, {**attributes, ORIGINAL_CLASS: cls})


def install(
    model: PreTrainedModel,
    config: LinearAttentionConfig,
    roots: Sequence[PreTrainedModel],
    positions: PositionChange | None = None,
    is_loading: bool = False,
) -> None:
    """Patch a model and the `roots` that it is a part of (see `outermost_models`).

    A model that `is_loading` has no weights yet to be tried with.

    Each model in which a layer is patched then is a patched model: it saves, reports and generates as one. An error
    leaves all as it was.
    """
    positions = positions or PositionChange()
    plan = plan_layers(model, config, roots[0], positions.added)
    if not is_loading:
        check_architecture(roots[0], [planned.layer for planned in plan.values()])
    tensor_plan = tensor_parallel_plan(roots[0], plan)
    # From here on there are only assignments, which cannot fail half-way.
    unshare_configs(*roots)
    positions.apply(model, record=True)
    install_layers(roots, plan)
    for root in roots:
        update_classes(root)
    if tensor_plan is not None:
        roots[0]._tp_plan = tensor_plan
    follow_parts()
    trust_own_checkpoints(model)


def uninstall(model: PreTrainedModel) -> None:
    """Take linear attention out of a model, and out of the models around it what belongs to that."""
    roots = outermost_models(model)
    remove_layers(model, roots)
    for root in roots:
        update_classes(root)
    if not any(map(is_patched, roots)):
        restore_trust(model)


def update_classes(root: PreTrainedModel) -> None:
    """Give a model and every model inside of it the class and the config that belong to what is patched in them."""
    for model in reversed([part for part in root.modules() if isinstance(part, PreTrainedModel)]):
        if is_patched(model):
            become_patched(model)
            vars(model.config).update(config_fields(model))
        elif isinstance(model, LinearAttentionModelMixin):
            become_exact(model)


def become_patched(model: PreTrainedModel) -> None:
    """Give a model its patched class."""
    model.__class__ = linear_attention_class(type(model))  # type: ignore[arg-type]
    model.all_tied_weights_keys = {**getattr(model, "all_tied_weights_keys", {}), **shared_parameters(model)}


def name_patched(root: nn.Module) -> None:
    """Let no patched model inside of a module have the name of the exact checkpoint that it was made from."""
    for model in root.modules():
        if isinstance(model, LinearAttentionModelMixin):
            model.name_or_path = model.name_or_path + PATCHED_NAME


@functools.cache
def follow_parts() -> None:
    """From now on, let a model become a patched one when a patched model is put into it."""
    register_module_module_registration_hook(_part_added)


def _part_added(parent: nn.Module, name: str, part: Any) -> None:
    # Some models slice their list of layers in every forward pass, which registers layers: those cost nothing here.
    layer = isinstance(parent, nn.ModuleList) and not isinstance(part, LinearAttentionModelMixin)
    if layer or torch.compiler.is_compiling() or not isinstance(part, nn.Module):
        return
    if any(isinstance(module, LinearAttentionModelMixin) for module in part.modules()):
        for model in models_around(parent):
            if not isinstance(model, LinearAttentionModelMixin):
                become_patched(model)
                name_patched(model)


def become_exact(model: PreTrainedModel) -> None:
    """Give a model its original class and tied weights again, and take our fields out of its config."""
    model.all_tied_weights_keys = {
        name: source for name, source in model.all_tied_weights_keys.items() if not is_learned(name)
    }
    if plan := model._tp_plan:
        model._tp_plan = {name: style for name, style in plan.items() if not name.endswith(f".{SUBMODULE}")}
    if CODE_MODULE in str(getattr(model.config, "auto_map", None)):
        del model.config.auto_map
    for name in (CONFIG_FIELD, IMPLEMENTATION_FIELD):
        vars(model.config).pop(name, None)
    model.name_or_path = model.name_or_path  # without PATCHED_NAME
    model.__class__ = base_class(type(model))


def config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """Return what the config of a patched model says of it."""
    layers = {str(index): layer for index, layer in installed_layers(model).items()}
    fields = {CONFIG_FIELD: LinearAttentionConfig(None, layers).to_dict(), IMPLEMENTATION_FIELD: IMPLEMENTATION}
    classes = auto_map(model)
    return {**fields, "auto_map": classes} if classes else fields


@contextmanager
def own_fields(model: PreTrainedModel) -> Iterator[None]:
    """Context manager inside of which the config says what belongs to this model.

    Models inside of one another may share their config, which then says what belongs to the outermost one.
    """
    present = vars(model.config)
    fields = config_fields(model)
    before = {name: present[name] for name in fields if name in present}
    present.update(fields)
    try:
        yield
    finally:
        for name in fields:
            present.pop(name)
        present.update(before)


def remove_refusals(config: Any) -> None:
    """Take the texts of `REFUSALS` out of a config, which otherwise lets no model be built."""
    fusions = getattr(config, FUSION_FIELD, None)
    if fusions is not None and all(map(_is_refusal, fusions)):
        delattr(config, FUSION_FIELD)
    if _is_refusal(config._experts_implementation):
        config._experts_implementation = None


def _is_refusal(text: Any) -> bool:
    """Return whether a text is that of `REFUSAL`, perhaps in the words of another version."""
    return isinstance(text, str) and text.startswith(REFUSAL.partition(".")[0])


def auto_mapping(cls: Any) -> Any:
    """Return the mapping of an `AutoModel…` class from types of configs to model classes; None of anything else."""
    is_auto_class = isinstance(cls, type) and issubclass(cls, _BaseAutoModelClass)
    return cls._model_mapping if is_auto_class else None


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Return `AutoModel…` -> class in the code file, for every auto class that knows this model type."""
    class_name = base_class(type(model)).__name__
    classes = {}
    for name, value in sorted(vars(modeling_auto).items()):
        mapping = auto_mapping(value)
        if not name.startswith("AutoModel") or mapping is None:
            continue
        value = mapping._model_mapping.get(model.config.model_type)
        names = (value,) if isinstance(value, str) else tuple(value or ())
        if names:
            classes[name] = f"{CODE_MODULE}.{class_name if class_name in names else names[0]}"
    return classes


def complete_checkpoint(folder: Path) -> None:
    """Write the code file beside a saved config, and into the config why Transformers' own classes cannot load it."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if CONFIG_FIELD in config:
        atomic_write(folder / CODE_FILE, CODE)
        atomic_write(path, json.dumps({**config, **REFUSALS}, indent=2, sort_keys=True) + "\n")


def downloaded_folder(
    repository: Any, subfolder: str = "", revision: str | None = None, cache_dir: Any = None, **_: Any
) -> Path | None:
    """Return the folder in the cache of the Hub that a repository was downloaded to; None for a local one, or none."""
    if repository is None or Path(repository).is_dir():
        return None
    path = try_to_load_from_cache(str(repository), str(PurePosixPath(subfolder, CONFIG_NAME)), cache_dir, revision)
    return Path(path).parent if isinstance(path, str) else None


def check_index(folder: Path) -> None:
    """Raise a ValueError where the index of a sharded checkpoint names a file outside of its folder, or where tensors
    of linear attention stand in two of its files: Transformers would take the last, whichever the index says."""
    for path in sorted(folder.glob("*.index.json")):
        try:
            names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} is no index of weights ({type(error).__name__}: {error}). Copy or download the "
                "checkpoint again."
            ) from error
        outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
        if outside:
            raise ValueError(
                f"{str(path)!r} names {outside[0]!r}, which is no file of its folder. Do not trust this checkpoint."
            )
        check_shards([folder / name for name in sorted(names) if name.endswith(".safetensors")])


def check_shards(paths: list[Path]) -> None:
    """Raise a ValueError where a tensor of linear attention stands in two files; missing and broken ones are not read.

    What is wrong with those Transformers says.
    """
    file_of: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if is_learned(name)]  # noqa: SIM118 (no dictionary)
        except (OSError, SafetensorError):
            continue
        for name in names:
            first = file_of.setdefault(name, path)
            if first != path:
                raise ValueError(
                    f"{name!r} stands in {str(first)!r} and in {str(path)!r}: which one belongs to the model? The "
                    "checkpoint was changed after it was saved: save it again from the patched model."
                )


def check_loading(path: Any, info: dict[str, Any], ignore_mismatched_sizes: bool = False) -> None:
    """Check what `from_pretrained` reports of a load; `path` is None for weights that were passed as `state_dict=`.

    Raises:
        ValueError: The weights of the linear attention do not match the config.
        MismatchedSizesError: Other weights have another size than the model.
    """
    source = "the given state_dict" if path is None else repr(str(path))
    names = {
        kind: sorted(key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys", ()))
        for kind in ("missing", "unexpected", "mismatched")
    }
    ours = {kind: list(filter(is_learned, keys)) for kind, keys in names.items()}
    if any(ours.values()):
        raise ValueError(
            f"The weights in {source} do not match the linear attention of its config.json "
            f"({'; '.join(f'{kind}: {_first_three(keys)}' for kind, keys in ours.items() if keys)}). "
            "The checkpoint was changed after it was saved, or belongs to another config: save it again from the "
            "patched model."
        )
    if names["mismatched"] and not ignore_mismatched_sizes:
        raise MismatchedSizesError(
            f"The weights in {source} have other sizes than the model of its config: "
            f"{_first_three(names['mismatched'])}. Give the config that belongs to them, or pass "
            "ignore_mismatched_sizes=True to start these anew."
        )


def check_quantization(model: PreTrainedModel) -> None:
    """Raise where weights were quantized without Transformers, so that a checkpoint could not say how to read them."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    for name, value in model.state_dict().items():
        is_tensor = isinstance(value, Tensor) and not type(value).__module__.startswith("torchao.")
        if not is_tensor or value.is_quantized or value.dtype in (torch.int8, torch.uint8):
            raise NotImplementedError(
                f"This {type(model).__name__} was quantized in memory ({name!r}), and no checkpoint can say how. Save "
                "it before, and quantize it while it is loaded: load_pretrained(path, "
                "quantization_config=TorchAoConfig(…))."
            )


def _first_three(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")


def transformers_class(name: str) -> type:
    """Return a model class of Transformers by its name, which a ValueError says if there is none."""
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
        raise ValueError(f"Transformers {transformers.__version__} has no model class {name!r}.")
    return cls
