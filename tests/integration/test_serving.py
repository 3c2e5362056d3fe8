"""Servers that lay out batches and caches by themselves: they must be refused, since they cannot hold a state."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_linear_attn as hla
from tests.comparing import logits
from tests.inputs import token_ids
from tests.small import patched
from tests.tiny_models import LLAMA

SERVERS = ("vllm", "sglang", "tgi")


@pytest.fixture(params=SERVERS)
def server(request):
    """A name under which a server has registered its attention."""
    AttentionInterface.register(request.param, sdpa_attention_forward)
    yield request.param
    AttentionInterface._global_mapping.pop(request.param)


@pytest.mark.parametrize("plan", ["hedgehog", {"default": "window", "0": "softmax"}], ids=["linear", "mixture"])
def test_continuous_batching_is_refused(plan):
    model = hla.patch_model(LLAMA.build(), plan)
    expected = logits(model, token_ids())
    for call in (
        lambda: model.generate_batch(token_ids().tolist(), max_new_tokens=2),
        lambda: model.generate(token_ids(), cache_implementation="paged", max_new_tokens=2),
        lambda: model.init_continuous_batching(),
    ):
        with pytest.raises(NotImplementedError, match=r"Continuous batching.*hf_linear_attn\.serving\.Engine"):
            call()
    assert torch.equal(logits(model, token_ids()), expected)


def test_a_paged_cache_among_the_arguments_is_refused():
    """What a server passes to the model by itself, without asking it for continuous batching."""

    class Pages:
        """The length is all that a model asks them for before its first layer."""

        def get_seq_length(self) -> int:
            return 0

    ids = token_ids()
    positions, mask = torch.arange(ids.shape[1])[None], torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril() == 1
    with pytest.raises(NotImplementedError, match=r"pages of keys .* hf_linear_attn\.serving\.Engine"):
        patched("hedgehog", LLAMA)(ids, cache=Pages(), use_cache=False, position_ids=positions, attention_mask=mask)


def test_a_model_of_a_server_is_not_patched(server):
    model = AutoModelForCausalLM.from_config(LLAMA.build().config, attn_implementation=server)
    with pytest.raises(NotImplementedError, match=rf"attn_implementation='{server}' belongs to a server"):
        hla.patch_model(model, "hedgehog")
    assert not hla.is_patched(model)


@pytest.mark.slow
def test_a_server_does_not_load_a_patched_checkpoint(server, tmp_path):
    patched("hedgehog", LLAMA).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="belongs to a server"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, attn_implementation=server)


@pytest.mark.parametrize("implementation", ["paged|eager", *SERVERS])
def test_a_server_cannot_take_the_attention_of_a_patched_model(implementation):
    model = patched("hedgehog", LLAMA)
    with pytest.raises(ValueError, match="this model runs linear attention"):
        model.set_attn_implementation(implementation)
    model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match="was changed to"):
        logits(model, token_ids())
