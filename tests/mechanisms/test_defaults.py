"""A mechanism is the same whatever dtype others have made PyTorch's default."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.cases import every_direction
from tests.inputs import padding_mask, qkv
from tests.small import default_dtype, small_options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_direction()
def test_other_default_dtypes_change_nothing(name, causal, dtype):
    inputs, mask = [x.float() for x in qkv(40)], padding_mask([40, 23], 40, "right")

    def results():
        torch.manual_seed(0)
        entry = ATTENTIONS.get(name)
        shape = AttentionShape(4, 2, 6, 6, layer_index=1, max_length=2048, causal=causal)
        module = entry.factory(shape, build_options(entry, small_options(entry.options))).eval()
        saved = {key: value.clone() for key, value in module.state_dict().items()}
        with torch.no_grad():
            return saved, module(AttentionInputs(*inputs, scaling=0.4, causal=causal, mask=mask))[0]

    weights, out = results()
    with default_dtype(dtype):
        others, actual = results()
    assert weights.keys() == others.keys()
    for key, value in weights.items():
        assert torch.equal(value, others[key]), key
    assert actual.dtype == out.dtype
    assert torch.equal(actual, out)
