"""Kernels inside of graphs of torch.compile: the numbers of eager mode, and any length without another graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from transformers import AutoModelForMaskedLM

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.ops.native import binding
from recipes.benchmarks import workloads
from tests.comparing import assert_close
from tests.inputs import token_ids
from tests.ops.test_native import REASON
from tests.slow_cases import long, slow_rows
from tests.small import patched
from tests.tiny_models import LLAMA, Family

pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.usefixtures("fresh_compiler")]

BERT = Family("bert", False, (), AutoModelForMaskedLM, num_layers=1)
GPT2 = Family("gpt2", True, (), num_layers=1)
MECHANISMS = ("elu", "hedgehog", "favor+", "window")


@pytest.fixture
def kernels(monkeypatch):
    """Names of the kernels that have run."""
    seen: list[str] = []
    original = binding.launch
    monkeypatch.setattr(binding, "launch", lambda name, filled: seen.append(name) or original(name, filled))
    return seen


def build(name, causal, dtype=torch.float32):
    return workloads.build(name, heads=4, head_dim=16, longest=256, causal=causal, seed=0, dtype=dtype)


def tokens(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, 4, count, 16, generator=generator).to(dtype) for _ in range(3)]


def gradients(model, logits, mask):
    model.zero_grad()
    logits[mask.bool()].square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("hedgehog", BERT),
        *slow_rows(("window", GPT2)),
        *long(("hedgehog", GPT2), ("favor+", BERT), ("favor+", GPT2), ("elu", BERT), ("elu", GPT2), ("window", BERT)),
    ],
    ids=str,
)
def test_a_compiled_model_runs_the_kernels_with_the_same_results(name, family, kernels):
    """Forward passes and gradients of padded batches, in two graphs: one of the first length, and one of any length."""
    model, counter = patched(name, family), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (13, 29, 90):
        ids = token_ids(2, length)
        inputs = {"attention_mask": torch.ones_like(ids)} | ({"use_cache": False} if family.causal else {})
        inputs["attention_mask"][0, -4:] = 0
        expected = model(ids, **inputs).logits
        computed = gradients(model, expected, inputs["attention_mask"])
        eager, kernels[:] = list(kernels), []
        actual = compiled(ids, **inputs).logits
        assert_close(actual, expected)
        for parameter, gradient in gradients(model, actual, inputs["attention_mask"]).items():
            assert_close(gradient, computed[parameter])
        assert kernels == eager
        assert [kernel.endswith("backward") for kernel in kernels] == [False, True]
        kernels.clear()
    assert counter.frame_count == 2


def test_numbers_may_be_inputs_of_a_graph(kernels):
    """With dynamic=True every number that a module holds is one, such as the scaling of a layer."""
    model, ids, mask = patched("hedgehog", LLAMA), token_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, -4:] = 0
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    computed = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert_close(computed, model(ids, attention_mask=mask, use_cache=False).logits)
    assert kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*MECHANISMS, "gla"])
def test_a_compiled_step_writes_over_its_state(name, dtype, kernels):
    module = build(name, True, dtype)

    def step(query, key, value, mask, state):
        return module(AttentionInputs(query, key, value, 0.25, True, mask, state, return_state=True))

    compiled, mask = torch.compile(step, backend="aot_eager", fullgraph=True), torch.ones(2, 1, dtype=torch.bool)
    with torch.no_grad():
        state = step(*tokens(90, dtype), None, None)[1]
        inplace = {part: tensor.clone() for part, tensor in state.items()}
        for _ in range(3):
            token = tokens(1, dtype)
            expected, state = step(*token, None, state)
            kernels.clear()
            actual, after = compiled(*token, mask, InPlaceState(inplace))
            assert kernels == ["windowed_step" if name == "window" else "causal"]
            assert_close(actual, expected)
            assert all(tensor is inplace[part] for part, tensor in after.items())
            for part, tensor in after.items():
                assert_close(tensor.float(), state[part].float())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_of_padding_leaves_the_state_of_its_row(backend):
    """Row 0 has a token, and row 1 has none: with a ring that is full, and with one that is not."""
    module = build("window", True)
    for length in (90, 20):
        with torch.no_grad():
            state = module(AttentionInputs(*tokens(length), 0.25, True, return_state=True))[1]
            mask = torch.tensor([[True], [False]])
            inputs = AttentionInputs(*tokens(1), 0.25, True, mask, state, return_state=True)
            with hla.use_backend(backend):
                out, after = module(inputs)
            single = module(AttentionInputs(*tokens(1), 0.25, True, None, state, return_state=True))
        assert_close(out[0], single[0][0])
        assert not out[1].any()
        for part, tensor in after.items():
            if part not in ("ring_key", "ring_value"):  # which may hold anything where the mask has no token
                assert_close(tensor[0].float(), single[1][part][0].float())
                assert_close(tensor[1].float(), state[part][1].float())


@pytest.mark.slow
def test_an_exported_program_has_torch_operations_only(kernels):
    model = patched("hedgehog", BERT)
    ids = token_ids(1, 9)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), strict=False)
        kernels.clear()
        program.module()(ids)
    assert not kernels
    assert "hf_linear_attn" not in program.graph_module.code


@pytest.mark.parametrize("kernel", ["bidirectional", "causal", "windowed", "causal_backward", "windowed_step"])
def test_the_operator_keeps_its_schema(kernel, monkeypatch):
    """What the operator says of itself is true: the memory that it writes to, and shapes that depend on nothing."""
    calls = []
    original = binding._run
    monkeypatch.setattr(binding, "_run", lambda *arguments: calls.append(arguments) or original(*arguments))
    name = "window" if kernel.startswith("windowed") else "hedgehog"
    module, causal = build(name, kernel != "bidirectional"), kernel != "bidirectional"
    arguments = [tensor.requires_grad_(kernel.endswith("backward")) for tensor in tokens(90)]
    with torch.set_grad_enabled(kernel.endswith("backward")):
        inputs = AttentionInputs(*arguments, 0.25, causal, return_state=kernel == "windowed_step")
        out, state = module(inputs)
        if kernel.endswith("backward"):
            out.sum().backward()
        if kernel == "windowed_step":
            module(AttentionInputs(*tokens(1), 0.25, True, None, InPlaceState(state), return_state=True))
    ran, inputs, outputs, numbers = calls[-1]
    assert ran == kernel
    names = " ".join((*inputs, *outputs, *numbers))
    tensors = [tensor.detach() for tensor in inputs.values()]
    values = [float(number) for number in numbers.values()]
    arguments = (kernel, names, tensors, [tensor.detach() for tensor in outputs.values()], values)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.hf_linear_attn.run.default, arguments, test_utils=utils)
