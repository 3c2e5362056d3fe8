"""The base class of adapters, and their registry by the names of attention classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...ops.window_blocks import MIN_BLOCK

#: Narrowest window of modules with vectors of distances: blocks of tokens are no longer than it.
LEAST_WINDOW = MIN_BLOCK


class Adapter:
    """What the attention modules of a family need while their model is patched: all of them, exact ones too."""

    #: Whether the modules call the attention interface only while `install` has replaced their `forward`.
    outside = False
    #: Whether the modules are causal; None where their flag and config say so.
    causal: bool | None = None
    #: The names of the terms that all modules add to their logits.
    terms: tuple[str, ...] = ()

    def applies(self, module: Any) -> bool:
        """Return whether a module needs the adapter: the class may have kinds that do not."""
        return True

    def span(self, module: Any) -> str:
        """Return "full", or what part of the sequence a module attends to."""
        return "full"

    def obstacle(self, module: Any) -> str:
        """Return why a module cannot be linear; "" where nothing is against it."""
        return ""

    def terms_of(self, module: Any) -> tuple[str, ...]:
        """Return the names of the terms that a module adds to its logits (`ops.terms.Terms`)."""
        return self.terms

    def bias_reach(self, module: nn.Module) -> int:
        """Return the distance from which on the position bias of a module is constant; 0 without one."""
        return 0

    def endless_positions(self, module: Any) -> bool:
        """Return whether what a module adds for a distance goes on changing at any distance."""
        return False

    def key_value_heads(self, module: Any) -> int | None:
        """Return the number of key-value heads that a module passes; None where it and its config say so."""
        return None

    def install(self, module: Any, parents: Sequence[Any]) -> None:
        """Change what a module does, but not its class; `parents` are the modules around it, the nearest first."""

    def remove(self, module: Any, parents: Sequence[Any]) -> None:
        """Undo `install`."""


class OutsideAdapter(Adapter):
    """The adapter of modules that compute their softmax by themselves.

    While their model is patched they run `forward`, which takes and returns what their own method does and computes
    the softmax by `call_interface`. Exact layers of the model do so, too.
    """

    outside = True
    causal = False
    #: Methods of the models around a module by their names, and what they are while it is patched.
    methods_around: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    @staticmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def install(self, module: Any, parents: Sequence[Any]) -> None:
        if not hasattr(module, "config"):
            module.config = next(parent.config for parent in parents if hasattr(parent, "config"))
            module.has_config_of_model = True
        if not hasattr(module, "is_causal"):
            module.is_causal = self.causal
            module.has_flag_of_family = True
        set_method(module, "forward", self.forward)
        for name, function in self.methods_around.items():
            for parent in parents:
                if hasattr(parent, name):
                    set_method(parent, name, function)

    def remove(self, module: Any, parents: Sequence[Any]) -> None:
        if vars(module).pop("has_config_of_model", False):
            del module.config
        if vars(module).pop("has_flag_of_family", False):
            del module.is_causal
        remove_method(module, "forward")
        for name in self.methods_around:
            for parent in parents:
                remove_method(parent, name)


def call_interface(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the attention function of a patched model: `[B, L, H, e]`, and the weights where they are requested."""
    return ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation](module, *args, **kwargs)


_ADAPTERS: dict[str, Adapter] = {}


def register(adapter: Adapter, *class_names: str) -> None:
    """Use an adapter for attention modules of these classes."""
    _ADAPTERS.update(dict.fromkeys(class_names, adapter))


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter of an attention module, if its class has one and it needs it."""
    adapter = _ADAPTERS.get(type(module).__name__)
    return adapter if adapter is not None and adapter.applies(module) else None


def set_method(module: Any, name: str, function: Any) -> None:
    """Give one module a method of its own; copies of it have it, too."""
    setattr(module, name, MethodType(function, module))


def remove_method(module: Any, name: str) -> None:
    """Give a module the method of its class again."""
    vars(module).pop(name, None)


def last_bucket(buckets: int, max_distance: int, *, two_sided: bool) -> int:
    """Return the distance from which on T5's buckets are the last one (or one more, where rounding may decide).

    Half of the buckets of a direction have one distance each; n more grow up to `max_distance` by equal factors.
    """
    per_direction = buckets // 2 if two_sided else buckets
    exact = per_direction // 2
    return math.floor(exact * (max_distance / exact) ** ((per_direction - 1 - exact) / (per_direction - exact))) + 1
