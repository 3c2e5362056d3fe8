"""Every tool on models that add terms to their logits: it works, or refuses with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_linear_attn as hla
from hf_linear_attn.exporting import export_model
from tests.architectures.inputs import tokens
from tests.architectures.properties import per_token, relative_difference
from tests.integration.packed import LENGTHS, positions
from tests.integration.test_terms import build, inputs_of, patched_with
from tests.slow_cases import long, slow, slow_rows

FAMILIES = ("gpt_oss", "gemma2", "t5", "mpnet", "deberta-v2")
EVERY = pytest.mark.parametrize("model_type", FAMILIES)
#: What LoRA adapts in each family.
PROJECTIONS = {"t5": ("q", "v"), "mpnet": ("q", "v"), "deberta-v2": ("query_proj", "value_proj")}


def narrow(model_type):
    """A model that sees far tokens: its windows are narrower than `inputs_of` is long."""
    return patched_with(build(model_type), window_size=4, feature_map="hedgehog", mix_init=0.0)


def training_rows(model_type, count=2):
    rows = []
    for seed in range(count):
        row = {"input_ids": tokens(120 if model_type in ("mpnet", "deberta-v2") else 24, seed=seed)}
        rows.append({**row, "decoder_input_ids": tokens(24, seed=seed + 9)} if model_type == "t5" else row)
    return rows


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [("gpt_oss", ""), ("gemma2", ""), ("mpnet", ""), ("deberta-v2", "does not hand")],
)
def test_packed_documents_are_computed_each_alone_or_refused(model_type, refused):
    model = narrow(model_type)
    documents = [tokens(length, batch=1, seed=length) for length in LENGTHS]
    start = 2 if model_type == "mpnet" else 0
    inputs = {"input_ids": torch.cat(documents, dim=1), "position_ids": positions(start=start)}
    if refused:
        with pytest.raises(NotImplementedError, match=refused):
            per_token(model, inputs)
        return
    expected = torch.cat([per_token(model, {"input_ids": ids}) for ids in documents], dim=1)
    torch.testing.assert_close(per_token(model, inputs), expected, rtol=1e-4, atol=1e-5)


@EVERY
def test_adapters_are_trained_and_merged(model_type):
    model = narrow(model_type)
    targets = list(PROJECTIONS.get(model_type, ("q_proj", "v_proj")))
    made = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapters = [parameter for name, parameter in made.named_parameters() if "lora" in name]
    optimizer, inputs = torch.optim.SGD(adapters, lr=1e-2), inputs_of(build(model_type))
    losses = []
    for _ in range(3):
        loss = made(**inputs)[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    with torch.no_grad():
        expected = made(**inputs)[0]
        merged = made.merge_and_unload()
        assert hla.is_patched(merged)
        assert relative_difference(merged(**inputs)[0], expected) < 1e-4


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", ["mpnet", *slow("gpt_oss", "gemma2", "t5", "deberta-v2")])
def test_compiled_models_have_one_graph(model_type):
    model = narrow(model_type)
    inputs = inputs_of(model)
    expected = per_token(model, inputs)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert relative_difference(per_token(model, inputs), expected) < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("model_type", "format", "refused"),
    [
        ("mpnet", "torch", ""),
        ("deberta-v2", "torch", "free length"),
        ("t5", "torch", "Encoder-decoders"),
        *slow_rows(("gpt_oss", "onnx", ""), ("deberta-v2", "onnx", "free length"), ("t5", "onnx", "Encoder-decoders")),
        *long(("gpt_oss", "torch", ""), ("gemma2", "torch", ""), ("gemma2", "onnx", ""), ("mpnet", "onnx", "")),
    ],
)
def test_exports_compute_what_the_model_does_or_are_refused(model_type, format, refused):
    """`export_model` compares an encoder's outputs itself."""
    model = narrow(model_type)
    if refused:
        with pytest.raises(NotImplementedError, match=refused):
            export_model(model, format)
        return
    exported, difference = export_model(model, format)
    assert exported.components
    assert difference is None or difference < 1e-4


@EVERY
def test_attention_transfer_brings_linear_layers_nearer_to_exact_ones(model_type):
    model = narrow(model_type)
    before = copy.deepcopy(model.state_dict())
    rows = training_rows(model_type)
    result = hla.transfer_attention(model, rows, max_steps=8, learning_rate=1e-2, validation=rows, eval_steps=4)
    after = model.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("linear_attention" in name for name in changed)
    losses = [loss for _, loss in result.evaluations]
    assert min(losses[1:]) < losses[0]


@EVERY
def test_heads_are_ranked(model_type):
    model = build(model_type)
    search = hla.find_exact_heads(model, None, training_rows(model_type), share=0.5, window_size=4, mix_init=0.0)
    assert bool(search.table["gain"].notna().all())
    patched = hla.patch_model(model, search.plan())
    assert bool(torch.isfinite(per_token(patched, inputs_of(patched))).all())
