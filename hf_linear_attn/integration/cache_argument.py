"""A cache among the arguments and the outputs of models: the only place that knows what Transformers calls it.

The argument and the output were named `past_key_values`, and are named `cache` from Transformers 5.24 on.
"""

import inspect
from collections.abc import Iterable
from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import Cache

#: What Transformers calls the argument, the newest name first.
CACHE_NAMES = ("cache", "past_key_values")


def find_cache(values: Iterable[Any]) -> Cache | None:
    """Return the first cache among values, such as the arguments of a call, by its type."""
    return next((value for value in values if isinstance(value, Cache)), None)


def named_cache(arguments: dict[str, Any]) -> Any:
    """Return what keyword arguments name a cache: none of `Cache` where continuous batching has pages; or None."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None


def output_cache(output: Any) -> Cache | None:
    """Return the cache of a model's output, which is a `ModelOutput` or a tuple; None where it has none."""
    return find_cache(output.values() if isinstance(output, dict) else output)


def takes_cache(model: Any) -> bool:
    """Return whether the `forward` of a model names a cache among its arguments."""
    return _name_in(model.forward) is not None


def cache_argument(model: Any, cache: Cache | None) -> dict[str, Cache | None]:
    """Return the keyword argument that hands a cache to a call of a model, or to its `generate`.

    The name is that of the model's `forward`. A model around another one (PEFT's) may have no such name; it gets that
    of the installed Transformers.
    """
    name = _name_in(model.forward) or _name_in(GenerationMixin.prepare_inputs_for_generation)
    assert name is not None
    return {name: cache}


def _name_in(function: Any) -> str | None:
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)
