"""The forms of Linformer: sharing, fit, mixed lengths, saving."""

import pytest
import torch

import hf_linear_attn as hla
from tests.comparing import assert_close, relative_error
from tests.inputs import padded_batch, padding_mask, qkv, token_ids
from tests.mechanisms import checks
from tests.reference import naive
from tests.tiny_models import BERT, GPT2

SHARINGS = pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
FITS = pytest.mark.parametrize("fit", ["resample", "truncate"])


def build(*sizes, **options):
    return checks.build("linformer", False, *sizes, seed=3, **{"num_slots": 5, "limit": 131, **options})


def fitted(parameter, options, length):
    """The projection of one row of `length` tokens, column by column: the definition of the forms."""
    if options.fit == "truncate":
        return parameter[..., :length]
    columns = parameter.shape[-1]
    fine = parameter.repeat_interleave(length, dim=-1) / length  # `length` pieces of each column
    return torch.stack([fine[..., p * columns : (p + 1) * columns].sum(dim=-1) for p in range(length)], dim=-1)


def definition(module, q, k, v, causal):
    length, options = q.shape[2], module.options
    if not length:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    project_key = fitted(module.project_key, options, length)
    projection = module.project_value if options.sharing != "kv" else module.project_key
    return naive.linformer_attention(q, k, v, project_key, fitted(projection, options, length), checks.SCALING)


@SHARINGS
@FITS
@pytest.mark.parametrize("length", [1, 4, 33, 131])
def test_equals_the_definition(sharing, fit, length):
    checks.check_output(build(4, 2, 5, 9, fit=fit, sharing=sharing), definition, length, dim=5, value_dim=9)


@SHARINGS
@FITS
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_mixed_lengths_in_one_batch(sharing, fit, padding_side):
    checks.check_padding(build(fit=fit, sharing=sharing), definition, padding_side)


def test_no_tokens():
    checks.check_output(build(), definition, 0)


@SHARINGS
def test_gradients(sharing):
    checks.check_gradients(build(6, 2, 5, 11, sharing=sharing), definition, 33, heads=6, groups=2, dim=5, value_dim=11)


@SHARINGS
def test_gradcheck(sharing):
    module = build(2, 1, 3, 2, limit=7, num_slots=2, sharing=sharing)
    checks.check_gradcheck(module, heads=2, groups=1, dim=3, value_dim=2)


def test_poisoned_padding_reaches_no_gradient():
    checks.check_poisoned_gradients(build())


@SHARINGS
def test_weights(sharing):
    checks.check_weights(build(sharing=sharing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half(dtype):
    checks.check_half(build(), definition, dtype, length=131)


def test_a_row_of_padding_is_zero():
    out, _ = checks.run(build(), *qkv(20), mask=padding_mask([20, 0], 20, "left"))
    assert float(out[1].abs().max()) == 0.0


# --------------------------------------------------------------------------------------------------------------------
# What the forms are


@pytest.mark.parametrize(
    ("sharing", "parameters"), [("none", 2 * 2 * 5 * 131), ("headwise", 2 * 5 * 131), ("kv", 5 * 131)]
)
def test_parameters(sharing, parameters):
    assert build(sharing=sharing).learned_parameters() == parameters


def test_a_gaussian_start_is_reproducible_and_differs_by_layer_and_role():
    made = [checks.build("linformer", False, init="gaussian", num_slots=16) for _ in range(2)]
    assert torch.equal(made[0].project_key, made[1].project_key)
    assert not torch.equal(made[0].project_key, made[0].project_value)
    assert float(made[0].project_key.std()) == pytest.approx(16**-0.5, rel=0.2)


# --------------------------------------------------------------------------------------------------------------------
# In a model


@SHARINGS
def test_saved_and_loaded_bit_equal(sharing, tmp_path):
    model = hla.patch_model(BERT.build(), "linformer", num_slots=5, sharing=sharing)
    for name, parameter in model.named_parameters():
        if "linear_attention" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(str(tmp_path))
    assert list(loaded.state_dict()) == list(model.state_dict())
    batch = padded_batch([token_ids(1, length)[0] for length in (3, 19)], "right")
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@SHARINGS
def test_a_transfer_trains_what_is_learned(sharing):
    model = hla.patch_model(BERT.build(), "linformer", num_slots=5, sharing=sharing)
    batches = [{"input_ids": token_ids(), "attention_mask": torch.ones(2, 21, dtype=torch.long)}]
    result = hla.transfer_attention(model, batches, max_steps=12, learning_rate=1e-2)
    assert result.losses[-1] < result.losses[0]


def test_mixed_lengths_through_a_model_equal_single_rows():
    model = hla.patch_model(BERT.build(), "linformer", num_slots=5)
    rows = [token_ids(1, length, seed=length)[0] for length in (2, 30, 11)]
    batch = padded_batch(rows, "right")
    together = model(**batch).logits
    for row, tokens in enumerate(rows):
        assert_close(together[row][batch["attention_mask"][row].bool()], model(tokens[None]).logits[0])
    assert relative_error(model(rows[1][None]).logits, BERT.build()(rows[1][None]).logits) > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": "rowwise"}, "sharing must be one of 'none', 'headwise', 'kv', 'layerwise', got 'rowwise'"),
        ({"init": "zeros"}, "init must be one of .segment-mean., .gaussian., got .zeros."),
        ({"fit": "pad"}, "fit must be one of .resample., .truncate., got .pad."),
        ({"num_slots": 0}, "num_slots must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        hla.patch_model(BERT.build(), "linformer", **options)


def test_errors_of_direction_and_length():
    with pytest.raises(NotImplementedError, match="Use 'linformer-causal'"):
        hla.patch_model(GPT2.build(), "linformer")
    with pytest.raises(ValueError, match=r"132 tokens.*max_length=131"):
        checks.run(build(), *qkv(132))
