"""Layers that were copied, or come from another model, read another config than the model that makes their masks."""

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from tests.comparing import assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.tiny_models import LLAMA

WHOLE = {"attention": "window", "window_size": 64}


def deepened(implementation="sdpa"):
    """A decoder of two layers and copies of both."""
    model = LLAMA.build()
    model.set_attn_implementation(implementation)
    model.model.layers.extend(copy.deepcopy(layer) for layer in list(model.model.layers))
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 4
    return model


def padded():
    return padded_batch([token_ids(1, 15)[0], token_ids(1, 21, seed=1)[0]], "left")


@torch.no_grad()
def in_pieces(model):
    cache = output_cache(model(token_ids()[:, :9], use_cache=True))
    return logits(model, token_ids()[:, 9:], **cache_argument(model, cache))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [[0], [1, 2], [3], None], ids=str)
def test_a_window_over_the_whole_input_is_exact(layers, implementation):
    model, inputs = deepened(implementation), padded()
    real = inputs["attention_mask"].bool()
    before, rows = logits(model, token_ids()), model(**inputs).logits[real]
    hla.patch_model(model, "window", window_size=64, layers=layers)
    assert_close(logits(model, token_ids()), before)
    assert_close(model(**inputs).logits[real], rows)
    assert_close(model(**{name: x[:1] for name, x in inputs.items()}).logits[real[:1]], rows[: real[0].sum()])
    assert_close(in_pieces(model), before[:, 9:])
    hla.unpatch_model(model)
    assert torch.equal(logits(model, token_ids()), before)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {implementation}


def test_a_student_of_its_teachers_layers():
    teacher, student = LLAMA.build(num_hidden_layers=3), LLAMA.build()
    student.model.layers = teacher.model.layers[:2]
    inputs = padded()
    real = inputs["attention_mask"].bool()
    taught, before, rows = logits(teacher, token_ids()), logits(student, token_ids()), student(**inputs).logits[real]
    hla.patch_model(student, {"default": "softmax", "1": WHOLE})
    assert_close(logits(student, token_ids()), before)
    assert_close(student(**inputs).logits[real], rows)
    assert_close(in_pieces(student), before[:, 9:])
    hla.unpatch_model(student)
    assert torch.equal(logits(student, token_ids()), before)
    assert torch.equal(logits(teacher, token_ids()), taught)
    assert {model.config._attn_implementation for model in (student, teacher)} == {"sdpa"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_exact_layer_put_into_a_patched_model_is_refused(implementation):
    """Eager attention would see what comes later: the model makes no mask for it."""
    model = LLAMA.build()
    model.set_attn_implementation(implementation)
    own = copy.deepcopy(model.model.layers[1])
    hla.patch_model(model, "window", window_size=64)
    patched = model.model.layers[1]
    model.model.layers[1] = own
    with pytest.raises(ValueError, match=r"'layers\.1\.self_attn'.*patched.*layers="):
        model(token_ids())
    model.model.layers[1] = copy.deepcopy(patched)
    whole = logits(model, token_ids())
    model.model.layers = model.model.layers[:1]  # a pruned model has fewer
    assert logits(model, token_ids()).shape == whole.shape


@torch.no_grad()
def test_errors_of_an_exact_model_around_a_patched_layer_or_set_to_our_implementation():
    patched, exact = hla.patch_model(LLAMA.build(), "hedgehog"), LLAMA.build()
    exact.model.layers[0] = patched.model.layers[0]
    with pytest.raises(NotImplementedError, match=r"exact model around this layer.*patch it as a whole"):
        exact(**padded())
    other = LLAMA.build()
    other.set_attn_implementation("hf_linear_attn")
    with pytest.raises(RuntimeError, match=r"an exact model was set to this implementation.*'sdpa' again"):
        other(token_ids())
    with pytest.raises(ValueError, match=r"exact LlamaForCausalLM was set to .*set_attn_implementation\('sdpa'\)"):
        hla.patch_model(other, "hedgehog", layers=[0])  # the other layer would call itself
