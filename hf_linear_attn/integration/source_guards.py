"""What the source of Transformers' modeling files says and no flag or config does: the only place that reads it.

Each function answers one question about a class, from the `forward` of that class. The source is parsed and written out
again first, so that comments, line breaks and quotes do not matter. The tests list what each guard sees in
Transformers, and fail where an upstream change makes it see something else.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

#: What a module's `forward` uses when it goes through the attention interface.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@functools.cache
def forward_source(cls: Any) -> str:
    """Return the source of the class's `forward`, in normal form; "" where there is none to read."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
        return ast.unparse(ast.parse(textwrap.dedent(source)))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return ""


def _guard(pattern: str) -> Callable[[type], bool]:
    return lambda cls: re.search(pattern, forward_source(cls)) is not None


#: Whether modules of the class go through Transformers' attention interface.
calls_interface = _guard(INTERFACE)
#: Whether a model calls its layers with `is_causal=True`.
passes_causal_argument = _guard(r"\bis_causal=True\b")
#: Whether a model makes the attention masks of its layers.
makes_masks = _guard(r"\bcreate_\w*mask\w*\(")
#: Whether a model makes masks by its position ids too: Transformers then begins a document at every jump.
makes_masks_by_positions = _guard(
    r"\b(?:create_\w*mask\w*|mask_function)\((?:[^()]|\([^()]*\))*position_ids|'position_ids': "
)
#: Whether a mixer of tokens (Mamba's first) goes on from its recurrent state by one token only: several begin anew.
restarts_its_state = _guard(r"(?s)^(?!.*initial_state)(?=.*\bseq_len == 1\b).*\.update_recurrent_state\(")
#: Whether modules of the class pass a logit soft cap to the attention, where their config has one.
caps_logits = _guard("softcap")
#: Whether modules of the class pass learned attention sinks to the attention, where they have some.
passes_sinks = _guard("s_aux=")


def own_masks(cls: type) -> set[str]:
    """Return the kinds of masks, causal or bidirectional, that a model makes for its own sequence."""
    return set(re.findall(r"\b(?!encoder)\w+ = create_(causal|bidirectional)_mask\(", forward_source(cls)))


def makes_causal_masks_only(cls: type) -> bool:
    """Return whether a decoder makes a causal mask, and no bidirectional one, for its own sequence."""
    return own_masks(cls) == {"causal"}


@functools.cache
def direction_source(cls: Any) -> str:
    """Return the expression that sets `is_causal` in modules of the class; "" where there is none, or several."""
    try:
        values = re.findall(r"self\.is_causal = (.+)", inspect.getsource(cls.__init__))
    except (OSError, TypeError):
        return ""
    return values[0].strip() if len(values) == 1 else ""


_class_source = functools.cache(inspect.getsource)


def computes_softmax_from_mask(cls: type) -> bool:
    """Return whether an attention module computes its softmax by itself, from a mask, outside of the interface."""
    source = forward_source(cls)
    if calls_interface(cls) or "mask" not in source or "ttention" not in cls.__name__:
        return False
    return "softmax(" in _class_source(cls)


@functools.cache
def names_sliding_window(cls: type) -> bool:
    """Return whether the source of a class names a sliding window: elsewhere one in the config changes nothing."""
    try:
        return "sliding_window" in inspect.getsource(cls)
    except (OSError, TypeError):
        return True


def argument_names(cls: type) -> tuple[tuple[str, ...], str | None]:
    """Return the names of the arguments of a class's `forward`, and that of its `**kwargs` or None."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
    return names, next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)


def passes_keyword_arguments_on(cls: type) -> bool:
    """Return whether `forward` takes `**kwargs` and hands them on in a call, but for that of its loss."""
    kwargs = argument_names(cls)[1]
    source = re.sub(r"\.loss_function\((?:[^()]|\([^()]*\))*\)", "", forward_source(cls))
    return kwargs is not None and source.count(f"**{kwargs}") > 1


def drops_arguments(cls: type) -> bool:
    """Return whether `forward` takes any argument, and hands only those on that it names."""
    return argument_names(cls)[1] is not None and not passes_keyword_arguments_on(cls)
