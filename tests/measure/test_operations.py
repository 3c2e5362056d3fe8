"""Operations against the eager form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.measure.speed import count_flops, measure_passes
from hf_linear_attn.utils.models import shared_copy
from tests.inputs import token_ids
from tests.tiny_models import BERT, FAMILIES, GPT2, Family


def eager(family: Family) -> PreTrainedModel:
    model = family.build()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_exact_attention_counts_as_in_its_eager_form(family: Family, backward: bool) -> None:
    """Forward, and forward with backward, of the fused kernel."""
    ids = token_ids(2, 40)

    def run(model: PreTrainedModel) -> Any:
        def call() -> None:
            out = model(ids)[0]
            if backward:
                out.square().mean().backward()

        return call

    fused, reference = count_flops(run(family.build())), count_flops(run(eager(family)))
    assert fused == reference > 0
    with torch.profiler.profile() as profiler:
        run(family.build())()
    assert any("flash_attention_for_cpu" in event.key for event in profiler.key_averages())


@pytest.mark.slow
def test_linear_attention_counts_whatever_kernel_runs() -> None:
    model = GPT2.build()
    linear, free = hla.patch_model(shared_copy(model), "elu"), without_attention(model)
    ids = token_ids(1, 90)
    counted = []
    for backend in ("auto", "torch"):
        with hla.use_backend(backend):
            counted.append(count_flops(lambda: linear(ids)))
    assert counted[0] == counted[1] > count_flops(lambda: free(ids))
    assert hla.get_backend() == "auto"


@pytest.mark.slow
def test_operations_of_a_backward_pass() -> None:
    model = BERT.build()
    models = {"exact": model, "elu": hla.patch_model(shared_copy(model), "elu")}
    options: dict[str, Any] = {"baseline": "exact", "seconds": 1e-9, "flops": True}
    forward = measure_passes(models, [3, 4, 5], 24, **options)
    both = measure_passes(models, [3, 4, 5], 24, measurement="forward+backward", **options)
    for name in models:
        once, twice = (rows[name]["flops"] for rows in (forward, both))
        assert twice > 2 * once > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_whose_input_is_a_parameter_is_counted() -> None:
    """DeBERTa normalises its embeddings of distances; torch's tracker of modules fails there without gradients."""
    norm, linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    with torch.no_grad():
        assert count_flops(lambda: linear(norm(linear.weight))) == 2 * 4 * 8 * 4
