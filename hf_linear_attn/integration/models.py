"""Models as Transformers builds them: their configs, their original class, and errors while their weights are saved."""

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .context import attention_modules, is_patched, layer_context

#: Attribute of the class of a patched model: the class that it had before.
ORIGINAL_CLASS = "_class_before_linear_attention"

#: Text in the RuntimeErrors that torch raises where it cannot write a file.
TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "iostream error", "unexpected pos")


def check_model(model: object) -> None:
    """Raise a TypeError that names the remedy, unless `model` is a `PreTrainedModel`."""
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


def has_adapter(model: nn.Module) -> bool:
    """Return whether PEFT has put an adapter into a module."""
    return any(True for _ in adapter_parts(model))


def adapter_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the parts of a module, with their names, into which PEFT has put adapters."""
    return ((name, part) for name, part in model.named_modules() if hasattr(type(part), "adapter_layer_names"))


def checkpoints_gradients(model: nn.Module) -> bool:
    """Return whether a model runs some of its layers in training mode with gradient checkpointing.

    The model around them may be in evaluation mode, for want of dropout.
    """
    return any(part.training and getattr(part, "gradient_checkpointing", False) for part in model.modules())


def check_patched(model: PreTrainedModel) -> None:
    """Raise a TypeError or ValueError unless it is a patched model."""
    check_model(model)
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")


def check_exact(model: PreTrainedModel) -> None:
    """Raise a TypeError or ValueError unless it is a model that is not patched."""
    check_model(model)
    contexts = [layer_context(module) for module in attention_modules(model)]
    if contexts:
        names = sorted({context.layer_config.attention for context in contexts if context and context.layer_config})
        raise ValueError(
            f"This {type(model).__name__} is already patched ({', '.join(names)} in {len(contexts)} layers). Call "
            "unpatch_model(model) first."
        )


def base_class(cls: type) -> type:
    """Return the original class of a patched model; any other class is returned as it is."""
    return getattr(cls, ORIGINAL_CLASS, cls)


def parent_names(name: str) -> Iterator[str]:
    """Iterate over the names of the modules around a module, the nearest first; the last is "", the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def parents_of(name: str, root: nn.Module) -> list[nn.Module]:
    """Return the modules around a module of a model, the nearest first."""
    return [root.get_submodule(parent) for parent in parent_names(name)]


def model_around(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the nearest `PreTrainedModel` around a module (the model itself is "")."""
    return next((parent for parent in parent_names(name) if isinstance(modules[parent], PreTrainedModel)), "")


def models_around(module: nn.Module) -> list[PreTrainedModel]:
    """Return every model that a module is a part of, itself among them if it is one, in no order.

    A module does not know its parents, so this asks the garbage collector for all models that there are: other models
    that `gc.freeze()` has hidden are not found.
    """
    # By the type, since `isinstance` also asks an object for its class, which proxies answer with an error.
    models: list[Any] = [value for value in gc.get_objects() if issubclass(type(value), PreTrainedModel)]
    around = [model for model in models if model is not module and any(part is module for part in model.modules())]
    return [module, *around] if isinstance(module, PreTrainedModel) else around


def outermost_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models that a model is a part of and that are no parts themselves; itself where it stands alone."""
    around = models_around(model)
    inner: set[int] = set()
    for other in around:
        inner |= {id(part) for part in other.modules()} - {id(other)}
    return [other for other in around if id(other) not in inner]


def unshare_configs(*models: nn.Module) -> None:
    """Give models copies of their configs, shared among them as before, because yet another model may share them."""
    memo: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}
    for model in models:
        modules |= {id(module): module for module in model.modules()}
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))


def all_configs(model: nn.Module) -> Iterator[PretrainedConfig]:
    """Iterate over every config that is an attribute of one of the model's modules, or of such a config, once each."""
    seen = set()
    queue: list[Any] = list(model.modules())
    while queue:
        holder = queue.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        queue += [value for value in vars(holder).values() if isinstance(value, PretrainedConfig)]
        if isinstance(holder, PretrainedConfig):
            yield holder


@contextmanager
def weight_write_errors(folder: Path | str) -> Iterator[None]:
    """Raise what safetensors and torch make of a full or failing disk as an OSError that names the folder."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in TORCH_WRITE_ERRORS):
            raise
        raise OSError(
            f"Cannot write weights to {str(folder)!r} ({' '.join(str(error).split())}). Free some space, or choose "
            "another folder."
        ) from error
