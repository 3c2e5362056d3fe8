"""torch.compile of patched models, without graph breaks."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForMaskedLM, DynamicCache

from hf_linear_attn.integration.cache_argument import cache_argument
from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.slow_cases import long
from tests.small import patched
from tests.tiny_models import LLAMA, Family

# One layer: compiling takes seconds a layer.
BERT = Family("bert", False, (), AutoModelForMaskedLM, num_layers=1)
GPT2 = Family("gpt2", True, (), num_layers=1)


pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("fresh_compiler")]


def compiled_logits(model, backend, ids, **inputs):
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        return compiled(ids, **inputs).logits


@every_pair((BERT, GPT2), quick=[], slow=("hedgehog", "window", "linformer", "gla", "nystrom", "luna"))
def test_a_padded_batch_compiles_without_graph_breaks(name, family):
    model = patched(name, family)
    batch = padded_batch([token_ids(1, 13)[0], token_ids(1, 6)[0]], "right")
    ids, extra = batch.pop("input_ids"), {"use_cache": False} if family.causal else {}
    assert_close(compiled_logits(model, "aot_eager", ids, **batch, **extra), logits(model, ids, **batch))


@pytest.mark.slow
def test_inductor():
    model = patched("hedgehog", BERT)
    assert_close(compiled_logits(model, "inductor", token_ids()), logits(model, token_ids()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gla", "luna", "window", *long("elu", "favor+", "hedgehog", "gated-delta", "rfa", "taylor")]
)
def test_compiled_generation(name):
    """One graph for the prompt, one or two for all tokens after it (the first state comes from the prompt's graph)."""
    model = patched(name, LLAMA)
    ids = token_ids(1, 9)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    assert 2 <= counter.frame_count <= 4


@pytest.mark.slow
def test_a_graph_that_breaks_inside_of_the_attention_keeps_the_state(monkeypatch):
    model = patched("elu", GPT2)
    mechanism = next(module for name, module in model.named_modules() if name.endswith("linear_attention"))
    forward = mechanism.forward

    def broken(inputs):
        torch._dynamo.graph_break()
        return forward(inputs)

    monkeypatch.setattr(mechanism, "forward", broken)
    ids, expected = token_ids(1, 9), logits(model, token_ids(1, 9))
    compiled, cache, outputs = torch.compile(model, backend="aot_eager"), DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in ids.split([6, 1, 1, 1], dim=1):
            outputs.append(compiled(part, **cache_argument(compiled, cache)).logits)
    assert_close(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("family", [BERT, pytest.param(GPT2, marks=pytest.mark.slow)], ids=str)
def test_gradients_of_a_compiled_model(family):
    model = patched("hedgehog", family)
    model(token_ids()).logits.square().mean().backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    extra = {"use_cache": False} if family.causal else {}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(token_ids(), **extra).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if name in eager:
            assert_close(parameter.grad, eager[name], factor=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", *long("linformer")])
def test_packed_documents_break_the_graph_and_stay_apart(name):
    """Where documents begin depends on the data: the layers run outside of the graph."""
    model, documents = patched(name, BERT), [token_ids(1, length, seed=length) for length in (5, 9)]
    inputs = {"position_ids": torch.cat([torch.arange(5), torch.arange(9)])[None]}
    compiled = torch.compile(model, backend="aot_eager")
    unpacked = torch.cat([logits(model, ids) for ids in documents], dim=1)
    with torch.no_grad():
        assert_close(compiled(torch.cat(documents, dim=1), **inputs).logits, unpacked)
        edges = torch.tensor([0, 5, 14], dtype=torch.int32)
        assert_close(compiled(torch.cat(documents, dim=1), **inputs, cu_seq_lens_q=edges).logits, unpacked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "fullgraph"),
    [({"use_cache": False}, True), *long(({}, False), ({"cu_seq_lens_q": torch.tensor([0, 5, 14])}, False))],
    ids=["positions", "positions and a cache", "boundaries"],
)
def test_packed_documents_of_a_compiled_decoder(extra, fullgraph):
    """Positions come as Transformers' full mask, in the graph, unless a cache is made; boundaries run outside of it."""
    model, documents = patched("hedgehog", GPT2), [token_ids(1, length, seed=length) for length in (5, 9)]
    inputs = {"position_ids": torch.cat([torch.arange(5), torch.arange(9)])[None], **extra}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    unpacked = torch.cat([logits(model, ids) for ids in documents], dim=1)
    with torch.no_grad():
        assert_close(compiled(torch.cat(documents, dim=1), **inputs).logits, unpacked)
