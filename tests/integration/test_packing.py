"""Packed documents: each gets the result that it has alone, in linear time, whatever the mechanism and direction."""

import copy
import logging

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaForCausalLM, Trainer, TrainingArguments

import hf_linear_attn as hla
from hf_linear_attn.integration.packing import Documents
from hf_linear_attn.measure.fidelity import measure_fidelity
from hf_linear_attn.training.transfer import transfer_attention
from tests.cases import every_pair
from tests.comparing import GRADIENT_FACTOR, assert_close, logits, relative_error
from tests.inputs import padded_batch, token_ids
from tests.integration.packed import as_ids, calls_of, documents, flattened, packed, positions, unpacked_logits
from tests.small import attentions, patch_small, patched
from tests.tiny_models import BERT, DECODERS, FAMILIES, GPT2, LLAMA, tiny_model

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)


# --------------------------------------------------------------------------------------------------------------------
# Packed equals alone


@every_pair()
def test_outputs_are_those_of_single_documents(name, family):
    model = patched(name, family)
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))


@every_pair()
def test_gradients_are_the_sum_of_those_of_single_documents(name, family):
    model = patched(name, family)
    inputs = packed((5, 9, 1, 26, 9))
    pick = torch.randn(inputs["input_ids"].shape[1], 61, generator=torch.Generator().manual_seed(3))
    (model(**inputs).logits[0] * pick).sum().backward()
    together = {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    start = 0
    for ids in documents((5, 9, 1, 26, 9)):
        (model(ids).logits[0] * pick[start : start + ids.shape[1]]).sum().backward()
        start += ids.shape[1]
    largest = max(float(param.abs().max()) for param in together.values())
    for key, param in model.named_parameters():
        if param.grad is not None and float(param.grad.abs().max()) > 1e-5 * largest:
            assert_close(together[key], param.grad, factor=5 * GRADIENT_FACTOR)


@EACH_FAMILY
def test_the_boundaries_of_the_collator(family):
    """With `return_flash_attn_kwargs=True`; it takes the place of position ids, which it comes with."""
    model = patched("hedgehog", family)
    batch = flattened(return_flash_attn_kwargs=True)
    assert batch["cu_seq_lens_q"].tolist()[:3] == [0, 5, 14]
    batch.pop("labels")
    with torch.no_grad():
        out = model(**batch).logits
    assert_close(out, unpacked_logits(model))
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([0, batch["input_ids"].shape[1]])
    with torch.no_grad():
        assert relative_error(model(**batch).logits, out) > 1e-2  # one document, as it says


@EACH_FAMILY
def test_rows_of_several_documents(family):
    """Two rows, each with its own documents; what fills a row up is one more of them."""
    model = patched("hedgehog", family)
    rows = [(7, 9, 14), (20, 6)]
    filling = 30 - 26
    ids = torch.stack(
        [torch.cat(documents(rows[0]), 1)[0], torch.cat([*documents(rows[1]), token_ids(1, filling)], 1)[0]]
    )
    position_ids = torch.cat([positions(rows[0]), positions((*rows[1], filling))])
    out = logits(model, ids, position_ids=position_ids)
    assert_close(out[:1], unpacked_logits(model, rows[0]))
    assert_close(out[1:, :26], unpacked_logits(model, rows[1]))
    edges = torch.tensor([0, 7, 16, 30, 50, 56, 60], dtype=torch.int32)
    assert_close(logits(model, ids, position_ids=position_ids, cu_seq_lens_q=edges), out)
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[1, 26:] = 0
    masked = logits(model, ids, position_ids=position_ids, cu_seq_lens_q=edges, attention_mask=padding)
    assert_close(masked[padding.bool()], out[padding.bool()])


@EACH_FAMILY
def test_documents_of_padded_rows(family):
    """Boundaries beside a padding mask: tokens that are no real ones belong to no document."""
    model = patched("window", family)
    ids, position_ids = torch.cat(documents((6, 8)), 1), positions((6, 8))
    wider = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], 1)
    wider_ids = torch.cat([torch.zeros(1, 2, dtype=torch.long), position_ids], 1)
    mask = torch.tensor([[0, 0, *[1] * 14]])
    edges = torch.tensor([0, 8, 16])
    out = logits(model, wider, position_ids=wider_ids, attention_mask=mask, cu_seq_lens_q=edges)
    assert_close(out[:, 2:], unpacked_logits(model, (6, 8)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@EACH_FAMILY
def test_exact_layers_of_a_mixture(family, implementation):
    model = family.build()
    model.set_attn_implementation(implementation)
    patch_small(model, "hedgehog", layers=[1])
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))
    with hla.exact_attention(model):
        assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_exact_attention_is_that_of_the_unpatched_decoder(family):
    model, exact = patched("hedgehog", family), family.build()
    exact.load_state_dict(model.state_dict(), strict=False)
    with hla.exact_attention(model):
        assert_close(logits(model, **as_ids(packed())), logits(exact, **as_ids(packed()), use_cache=False))


def windowed_model():
    """A decoder with a layer of a sliding window beside one of full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "intermediate_size": 40}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **kinds, num_key_value_heads=2, pad_token_id=0)).eval()


def windowed_encoder():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {"global_attn_every_n_layers": 2, "local_attention": 4, "intermediate_size": 40, "pad_token_id": 0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**sizes, **rest, **tokens)).eval()


@pytest.mark.parametrize("build", [windowed_model, windowed_encoder])
def test_layers_of_a_sliding_window_stay_inside_of_a_document(build):
    model = hla.patch_model(build(), "hedgehog")
    assert "softmax" in attentions(model)
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))
    assert_close(logits(model, **as_ids(packed()), use_cache=False), unpacked_logits(model))


# --------------------------------------------------------------------------------------------------------------------
# Cost


@every_pair()
def test_the_time_is_linear(name, family, caplog):
    """Ten times the documents: the same calls, ten times the elements, hardly any padding, and no warning."""
    model = patched(name, family)
    elements = []
    with caplog.at_level(logging.WARNING):
        for times in (1, 4):
            inputs = packed((3, 20, 24, 23) * times)
            sizes = calls_of(model, lambda inputs=inputs: logits(model, **as_ids(inputs)))
            assert len(sizes) == 2 * 2  # layers x groups of like length
            elements.append(sum(batch * length for batch, length in sizes))
    assert elements[1] == 4 * elements[0]
    assert "4D" not in caplog.text


def test_padding_is_bounded():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 3000, (300,), generator=generator).tolist()
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    param = Documents(edges, (1, sum(lengths)))
    assert sum(group.index.numel() for group in param.groups) <= sum(lengths) * 8 / 7 + 16 * len(lengths)
    assert len(param.groups) <= 45
    assert sorted(
        torch.cat([g.index[g.mask if g.mask is not None else ...].flatten() for g in param.groups]).tolist()
    ) == [*range(sum(lengths))]


def test_boundaries_are_worked_out_once_a_forward_pass(monkeypatch):
    model, made = patched("hedgehog", LLAMA), []
    monkeypatch.setattr(Documents, "group", lambda self, part, old=Documents.group: made.append(1) or old(self, part))
    logits(model, **as_ids(packed((9, 9))))
    assert len(made) == 1


@pytest.mark.parametrize("rewritten", ["boundaries", "padding"])
@pytest.mark.parametrize("inference", [False, True])
def test_buffers_may_be_written_over_between_calls(inference, rewritten):
    """A layer that is called by itself, or by a model that makes no mask, gets the caller's own tensors."""
    model = patched("hedgehog", LLAMA)
    hidden = torch.randn(1, 14, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    rotary = model.model.rotary_emb(hidden, torch.arange(14)[None])
    with torch.inference_mode(inference), torch.set_grad_enabled(False):

        def run(boundaries, mask):
            layer = model.model.layers[0].self_attn
            return layer(hidden, position_embeddings=rotary, attention_mask=mask, cu_seq_lens_q=boundaries)[0]

        boundaries, mask = torch.tensor([0, 6, 14]), None
        if rewritten == "padding":
            mask = torch.ones(1, 14, dtype=torch.bool)
        run(boundaries, mask)
        if rewritten == "padding":
            mask[:, :3] = False
        else:
            boundaries[1] = 9
        assert_close(run(boundaries, mask), run(boundaries.clone(), None if mask is None else mask.clone()))


# --------------------------------------------------------------------------------------------------------------------
# Training and measuring


@pytest.mark.parametrize("reentrant", [True, False])
@EACH_FAMILY
def test_gradient_checkpointing(family, reentrant):
    model, batch = patched("hedgehog", family), flattened()
    model(**batch).loss.backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(**batch).loss.backward()
    assert expected
    for name, param in model.named_parameters():
        if name in expected:
            assert_close(param.grad, expected[name], factor=GRADIENT_FACTOR)


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [False, True])
@EACH_FAMILY
def test_trainer_with_flattened_batches(family, kwargs, tmp_path):
    """The weights after training are those of training on the same rows, padded."""
    rows = [{"input_ids": ids[0].tolist(), "labels": ids[0].tolist()} for ids in documents((5, 9, 12, 9))]

    def padded(rows):
        batch = padded_batch([torch.tensor(row["input_ids"]) for row in rows], "right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, 0] = -100  # as the collator does
        return {**batch, "labels": labels}

    def trained(collator):
        model = patched("hedgehog", family)
        settings = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=0,
        )  # fmt: skip
        Trainer(model, settings, train_dataset=rows, data_collator=collator).train()
        return model.eval()

    torch.manual_seed(0)
    first = trained(DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=kwargs))
    torch.manual_seed(0)
    second = trained(padded)
    assert_close(logits(first, token_ids()), logits(second, token_ids()), factor=100)


@pytest.mark.parametrize("name", ["hedgehog", "linformer"])
def test_fidelity_and_transfer_see_documents(name):
    model = patched(name, BERT)
    rows = [ids[0] for ids in documents((5, 9, 12))]
    padded, flat = padded_batch(rows, "right"), packed((5, 9, 12))
    # Beside a mask positions say nothing of documents, and boundaries do.
    bounded = {**flat, "attention_mask": torch.ones(1, 26), "cu_seq_lens_q": torch.tensor([0, 5, 14, 26])}
    expected = measure_fidelity(model, [padded])
    course = transfer_attention(copy.deepcopy(model), [padded], max_steps=2)
    for batch in (flat, bounded):
        measured = measure_fidelity(model, [batch])
        assert measured.tokens == expected.tokens == 26
        assert measured.output_error == pytest.approx(expected.output_error, rel=1e-4)
        assert measured.kl == (None if expected.kl is None else pytest.approx(expected.kl, rel=1e-4))
        result = transfer_attention(copy.deepcopy(model), [batch], max_steps=2)
        assert result.losses == pytest.approx(course.losses, rel=1e-3)
        assert result.tokens == course.tokens == 52


@pytest.mark.parametrize("layers", [None, [1]], ids=["linear", "mixture"])
@EACH_FAMILY
def test_weights_are_zero_between_documents(family, layers):
    model = patch_small(family.build(), "hedgehog", layers=layers)
    with torch.no_grad():
        weights = model(**packed((6, 8)), output_attentions=True, use_cache=False).attentions
        unpacked_logits = model(documents((8,))[0], output_attentions=True, use_cache=False).attentions
    for layer, single in zip(weights, unpacked_logits, strict=True):
        assert not layer[:, :, :6, 6:].any()
        assert not layer[:, :, 6:, :6].any()
        assert_close(layer[:, :, 6:, 6:], single)


def test_redrawing_counts_forward_passes():
    model = patched("favor+", GPT2, redraw_every=2).train()
    maps = [m for name, m in model.named_modules() if name.endswith("feature_map")]
    model(**packed(), use_cache=False)
    assert [int(param.passes) for param in maps] == [1, 1]


@EACH_FAMILY
def test_half_precision(family):
    model = patched("hedgehog", family).bfloat16()
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model), torch.bfloat16)


def test_grouped_query_heads_and_inputs_embeds():
    model = patch_small(tiny_model("llama", LlamaForCausalLM, num_key_value_heads=1), "window")
    inputs = packed()
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    with torch.no_grad():
        out = model(inputs_embeds=embedded, position_ids=inputs["position_ids"]).logits
    assert_close(out, unpacked_logits(model))
