"""The name of the cache is that of the signature; caches are found by their type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import DynamicCache

import hf_linear_attn
from hf_linear_attn.integration.cache_argument import cache_argument, find_cache, output_cache, takes_cache
from tests.inputs import token_ids
from tests.tiny_models import tiny_model


class Old(nn.Module):
    """The code of a repository of an earlier time."""

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Any:
        return ids, past_key_values


class New(nn.Module):
    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        return ids, cache


class Wrapper(nn.Module):
    """Takes anything, as PEFT's models do."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


@pytest.mark.parametrize("model", [Old(), New()])
def test_the_name_is_that_of_the_signature(model: nn.Module) -> None:
    cache = DynamicCache()
    assert takes_cache(model)
    assert output_cache(model(token_ids(), **cache_argument(model, cache))) is cache


def test_a_wrapper_gets_the_name_of_the_installed_release() -> None:
    model, cache = tiny_model("llama"), DynamicCache()
    wrapper = Wrapper(model)
    assert not takes_cache(wrapper)
    assert output_cache(wrapper(token_ids(2, 5), **cache_argument(wrapper, cache))) is cache
    assert cache.get_seq_length() == 5


def test_outputs_without_a_cache() -> None:
    assert output_cache(tiny_model("bert")(token_ids(2, 5))) is None
    assert find_cache([None, 3, token_ids()]) is None


def test_no_other_module_names_the_argument() -> None:
    folder = Path(hf_linear_attn.__file__).parent
    names = [path.name for path in folder.rglob("*.py") if "past_key_values" in path.read_text(encoding="utf-8")]
    assert names == ["cache_argument.py"]
