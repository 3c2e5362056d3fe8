"""What linear attention cannot apply is refused, whoever asks for it; and what is asked for needlessly is taken."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import bidirectional_mask_function

import hf_linear_attn as hla
from hf_linear_attn.integration.attention import UNSUPPORTED, linear_attention_forward
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import IMPLEMENTATION, attention_modules
from hf_linear_attn.integration.discovery import HEAD_DIM, HEADS, AttentionLayer, attention_shape
from hf_linear_attn.integration.exact import eager_function
from hf_linear_attn.integration.mask import linear_attention_mask, padding_of
from hf_linear_attn.integration.models import weight_write_errors
from tests.comparing import assert_close, logits
from tests.inputs import qkv, token_ids
from tests.small import patched
from tests.tiny_models import LLAMA


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["1", "3"])
def test_layers_that_share_keys_and_values(layer):
    config = AutoConfig.for_model(
        "gemma3n_text",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        vocab_size=97,
        vocab_size_per_layer_input=97,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        laurel_rank=8,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    with pytest.raises(NotImplementedError, match="shares its keys and values with other layers"):
        hla.patch_model(AutoModelForCausalLM.from_config(config), {layer: "elu"})


@torch.no_grad()
def test_padding_beside_layers_that_reuse_keys_and_values():
    """Gemma 4 has its last layers compute the last queries only, and cuts their masks for that."""
    config = AutoConfig.for_model(
        "gemma4_text",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        intermediate_size=32,
        vocab_size=97,
        layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"],
        num_kv_shared_layers=1,
        sliding_window=4,
        hidden_size_per_layer_input=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = hla.patch_model(AutoModelForCausalLM.from_config(config).eval(), "hedgehog", layers=[0])
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    padded = model.generate(ids, attention_mask=mask, **settings)
    for row, start in enumerate((0, 5)):
        unpadded = model.generate(ids[row : row + 1, start:], **settings)
        assert torch.equal(padded.sequences[row, 12:], unpadded.sequences[0, 12 - start :])
        assert_close(torch.stack(padded.logits)[:, row], torch.stack(unpadded.logits)[:, 0])


def test_layers_whose_keys_an_indexer_chooses():
    """MiniMax M3 masks the other keys where it knows the attention implementation, and would see all of them."""
    config = AutoConfig.for_model(
        "minimax_m3_vl_text",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rotary_dim=4,
        vocab_size=97,
        mlp_layer_types=["dense", "dense"],
        dense_intermediate_size=32,
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match=r"layers\.1\.self_attn \(MiniMaxM3VLAttention\) an indexer chooses"):
        hla.patch_model(model, "hedgehog")
    assert not hla.is_patched(model)


def layer():
    return next(attention_modules(patched("hedgehog", LLAMA)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_arguments_that_change_the_weights(name):
    """Some architecture may pass them; without a refusal its outputs would be silently different."""
    module, (q, k, v) = layer(), qkv(5, dim=8, value_dim=8)
    out, _ = linear_attention_forward(module, q, k, v, None, **{name: None})
    assert out.shape == (2, 5, 4, 8)
    with pytest.raises(NotImplementedError, match=f"'{name}'.*Give the layer 'softmax'"):
        linear_attention_forward(module, q, k, v, None, **{name: torch.ones(1)})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"heads": 2}, {"groups": 4}, {"dim": 4}], ids=str)
def test_other_sizes_than_it_was_built_for(sizes):
    q, k, v = qkv(5, **{"dim": 8, "value_dim": 8, **sizes})
    with pytest.raises(ValueError, match="its linear attention was built for 4, 2 and 8"):
        linear_attention_forward(layer(), q, k, v, None)


def test_traces_of_torchscript():
    model = patched("hedgehog", LLAMA).requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace.*Use hf_linear_attn\.export"):
        torch.jit.trace(lambda ids: logits(model, ids), token_ids(), check_trace=False)


@pytest.mark.slow
def test_packed_documents_beside_another_sequence():
    q, k, v = qkv(7, dim=8, value_dim=8)
    with pytest.raises(NotImplementedError, match=r"another sequence of 7 tokens.*Pass padded rows"):
        linear_attention_forward(layer(), q[:, :, :5], k, v, None, cu_seq_lens_q=torch.tensor([0, 3, 5]))


@torch.no_grad()
def test_a_full_mask_after_tokens_that_a_state_holds():
    model = patched("hedgehog", LLAMA)
    cache = output_cache(model(token_ids(), use_cache=True))
    mask = torch.ones(2, 1, 1, 22, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"4D attention mask cannot be used with a cache.*a 2D mask"):
        model(token_ids(length=1), **cache_argument(model, cache), attention_mask=mask)


def test_eager_attention_of_a_file_that_has_none():
    with pytest.raises(NotImplementedError, match="The modeling file of Linear has no eager_attention_forward"):
        eager_function(nn.Linear(1, 1))


@pytest.mark.slow
def test_sizes_that_a_layer_does_not_tell():
    module = next(attention_modules(patched("hedgehog", LLAMA)))
    module.config = None
    for name in (*HEADS, *HEAD_DIM):
        if hasattr(module, name):
            delattr(module, name)
    with pytest.raises(NotImplementedError, match=r"number of heads or their size is not to be found on 'attention'"):
        attention_shape(AttentionLayer("attention", module, {}, None, False, "full", "", True), 0, None)


@pytest.mark.slow
def test_an_index_of_weights_that_is_none(tmp_path):
    model = patched("hedgehog", LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (index,) = tmp_path.glob("*.index.json")
    for text in ("{", "[]", "{}", '{"weight_map": 1}'):
        index.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"is no index of weights .* Copy or download the checkpoint again"):
            hla.load_pretrained(str(tmp_path))


@pytest.mark.parametrize("is_cached", [False, True], ids=["a folder", "the cache of the Hub"])
def test_a_tensor_that_stands_in_two_shards(is_cached, tmp_path):
    """Transformers loads that of the last file, though the index names the first: of ours, this is refused."""
    model = patched("hedgehog", LLAMA)
    repository = tmp_path / "models--someone--decoder"
    folder = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    model.save_pretrained(folder, max_shard_size="20KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    source = ("someone/decoder", {"cache_dir": str(tmp_path)}) if is_cached else (str(folder), {})
    (index,) = folder.glob("*.index.json")
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    name = next(name for name in shards if "linear_attention" in name)
    others = sorted({file for file in shards.values() if file != shards[name]})
    assert others
    for other in others:
        before = (folder / other).read_bytes()
        save_file({**load_file(folder / other), name: model.state_dict()[name] + 1}, folder / other, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"{name}' stands in .* and in .*: which one belongs to the model"):
            hla.load_pretrained(source[0], **source[1])
        (folder / other).write_bytes(before)
    assert torch.equal(logits(hla.load_pretrained(source[0], **source[1]), token_ids()), logits(model, token_ids()))


def test_other_errors_while_saving_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="not of the disk"), weight_write_errors(tmp_path):
        raise RuntimeError("not of the disk")


def test_keys_beyond_a_padding_mask_are_padding():
    """A mask of both directions that ends before the keys do, as with a cache of a fixed size."""
    mask = torch.ones(2, 5, dtype=torch.long)
    full = linear_attention_mask(
        batch_size=2, q_length=7, kv_length=7, mask_function=bidirectional_mask_function, attention_mask=mask
    )
    assert full.shape == (2, 1, 7, 7)
    assert padding_of(full).tolist() == [[True] * 5 + [False] * 2] * 2


@pytest.mark.slow
def test_the_implementation_that_runs_already_may_be_set_again():
    model = patched("hedgehog", LLAMA)
    expected = logits(model, token_ids())
    model.set_attn_implementation(IMPLEMENTATION)
    assert torch.equal(logits(model, token_ids()), expected)


@pytest.mark.slow
def test_loading_with_a_config_at_hand(tmp_path):
    model = patched("hedgehog", LLAMA)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    loaded = hla.load_pretrained(str(tmp_path), config=config)
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    with pytest.raises(ValueError, match="has no linear attention"):
        hla.load_pretrained(str(tmp_path), config=LLAMA.build().config)
