"""`mix_weight` of hybrids: how much the part outside the window weighs is a learned function of the query."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor
from transformers import BertModel

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.integration.exact import AttentionCall, observe_attention
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.backends import use_backend
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.training.transfer import transfer_attention
from tests.inputs import token_ids
from tests.tiny_models import tiny_model

BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
SCALING = 0.35


def build(causal, **options):
    entry = ATTENTIONS.get("window")
    options = {"window_size": 4, "saturation": None, **options}
    made = entry.factory(AttentionShape(4, 2, 8, 8, causal=causal), entry.options(**options))
    generator = torch.Generator().manual_seed(3)
    made.mix_weight.data = torch.randn(made.mix_weight.shape, generator=generator)
    return made


def inputs(length=40):
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(2, heads, length, 8, generator=generator) for heads in (4, 2, 2))


@BOTH
def test_far_weights_follow_the_formula(causal):
    """Against the same map with u = 0, row by row from the explicit weights."""
    query, key, value = inputs()
    mixed, unmixed = build(causal, sink_tokens=0), build(causal, sink_tokens=0)
    unmixed.mix_weight.data.zero_()
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    inside = (distance.abs() < 4) & ((distance >= 0) | (not causal))
    far = ((distance >= 0) | (not causal)) & ~inside
    ratio = []
    for built in (mixed, unmixed):
        weights = built.attention_weights(AttentionInputs(query, key, value, scaling=SCALING, causal=causal))
        ratio.append((weights * far).sum(-1) / (weights * inside).sum(-1))
    gain = torch.einsum("bhld,hd->bhl", query, mixed.mix_weight) * SCALING**0.5
    assert torch.allclose(ratio[0], ratio[1] * gain.exp(), rtol=1e-4, atol=1e-6)


@BOTH
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_output_is_that_of_the_weights(causal, backend):
    built, (query, key, value) = build(causal), inputs()
    with torch.no_grad(), use_backend(backend):
        weights = built.attention_weights(AttentionInputs(query, key, value, scaling=SCALING, causal=causal))
        out, _ = built(AttentionInputs(query, key, value, scaling=SCALING, causal=causal))
    assert torch.allclose(out, weights @ value.repeat_interleave(2, dim=1), atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_steps_are_the_parallel_form(backend):
    built, (query, key, value) = build(True, saturation=6), inputs()
    with torch.no_grad(), use_backend(backend):
        full, _ = built(AttentionInputs(query, key, value, scaling=SCALING, causal=True))
        parts, state = [], None
        for part in (slice(30), *(slice(position, position + 1) for position in range(30, 40))):
            tensors = (x[:, :, part] for x in (query, key, value))
            out, state = built(AttentionInputs(*tensors, scaling=SCALING, causal=True, state=state, return_state=True))
            parts.append(out)
    assert torch.allclose(torch.cat(parts, dim=2), full, atol=2e-5)


@BOTH
def test_nan_in_padding_does_not_reach_its_gradient(causal):
    built, (query, key, value) = build(causal), inputs()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 30:] = False
    grads = []
    for filler in (0.0, float("nan")):
        q, k, v = (x.clone() for x in (query, key, value))
        for tensor in (q, k, v):
            tensor[0, :, 30:] = filler
        out, _ = built(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))
        loss = out.transpose(1, 2)[mask].square().sum()
        grads.append(torch.autograd.grad(loss, [built.mix_weight])[0])
    assert grads[0].abs().max() > 0
    assert torch.allclose(grads[1], grads[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_is_learned_by_transfer_and_saved(tmp_path):
    model = hla.patch_model(tiny_model("bert", BertModel), "window", window_size=3)
    batch = {"input_ids": token_ids(), "attention_mask": torch.ones(2, 21, dtype=torch.long)}
    transfer_attention(model, [batch], max_steps=5)
    learned = {name: parameter for name, parameter in model.named_parameters() if name.endswith("mix_weight")}
    assert len(learned) == model.config.num_hidden_layers
    assert all(parameter.abs().max() > 0 for parameter in learned.values())
    model.save_pretrained(tmp_path)
    again = dict(hla.load_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in learned.items())


@pytest.mark.slow
def test_training_a_part_that_was_never_fitted_is_warned_of_once() -> None:
    torch.manual_seed(0)
    model = hla.patch_model(tiny_model("llama"), "window", window_size=4).train()
    ids = torch.randint(3, 50, (1, 12))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
    with pytest.warns(UserWarning, match=r"training does not open it. Call hf_linear_attn.calibrate\(model, batches\)"):
        model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
        fitted = hla.patch_model(tiny_model("llama"), "window", window_size=4)
        hla.calibrate(fitted, [{"input_ids": ids}])
        fitted.train()(ids)
        hla.patch_model(tiny_model("llama"), "window", window_size=4, feature_map="hedgehog").train()(ids)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_patched_without_data_it_is_the_window_alone_and_the_report_says_so(family) -> None:
    """Exact attention to the keys of the window and the sinks, and to nothing else, until `calibrate` has run."""
    exact = tiny_model(family)
    model = hla.patch_model(copy.deepcopy(exact), "window", window_size=4)
    ids = token_ids()
    calls: list[tuple[Tensor, Tensor]] = []

    def observer(call: AttentionCall) -> None:
        weights = call.exact_weights() * ~call.outside()
        values = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        calls.append((weights / weights.sum(-1, keepdim=True) @ values, call.linear_output()))

    with torch.no_grad(), observe_attention(model, observer):
        model(ids)
    assert len(calls) == 2
    for expected, implied in calls:
        assert torch.allclose(implied, expected, atol=1e-5)
    said = "nothing is attended to outside of the window yet: calibrate(model, batches)"
    assert said in str(hla.patch_report(model))
    hla.calibrate(model, [{"input_ids": ids}])
    assert said not in str(hla.patch_report(model))
