"""Every mechanism in every family: gradients, precision, gradient checkpointing, weights, mixtures."""

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration import attention
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.integration.discovery import self_attention
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.common import SIGNED_NORMALISER_EPS
from hf_linear_attn.ops.kernel_inputs import unsupported_inputs
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_pair
from tests.comparing import GRADIENT_FACTOR, TOLERANCE, assert_close, logits, relative_error, weighted_sum
from tests.inputs import padded_batch, token_ids
from tests.small import patched, randomize_learned, small_options
from tests.tiny_models import DECODERS, LLAMA


def gradients(model, **inputs):
    """Gradients of a loss that reaches every parameter, by name."""
    model.zero_grad()
    weighted_sum(model(**inputs).logits).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def depth_factor(model):
    """How much more than one rounding a model of this depth loses: an exact model with large weights, about 4."""
    module = next(attention_modules(model)).linear_attention
    # Signed weights cancel in the normaliser: the guard lets what rounding leaves grow by 1/ε.
    signed = getattr(getattr(module, "feature_map", None), "signed", False)
    return 4 / SIGNED_NORMALISER_EPS if signed else 4


def mixture(name):
    return {"default": {"attention": name, **small_options(ATTENTIONS.get(name).options)}, "0": "softmax"}


def attention_output(model, layer, ids, **kwargs):
    """What the self-attention module of one layer returned."""
    seen = []
    module = self_attention(model)[layer].module
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    logits(model, ids, **kwargs)
    handle.remove()
    return seen[0]


@every_pair()
def test_every_parameter_has_a_finite_gradient(name, family):
    model = patched(name, family).train()
    grads = gradients(model, input_ids=token_ids())
    unused = {key for key, _ in model.named_parameters()} - set(grads)
    assert not {key for key in unused if "linear_attention" in key}
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    learned = [grad for key, grad in grads.items() if "linear_attention" in key]
    assert bool(learned) is ATTENTIONS.get(name).learned
    assert all(float(grad.abs().max()) > 0 for grad in learned)


@every_pair()
def test_gradients_are_finite_beside_a_fully_padded_row(name, family):
    model = patched(name, family)
    mask = torch.tensor([[1] * 9, [0] * 9])
    grads = gradients(model, input_ids=token_ids(2, 9), attention_mask=mask)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@every_pair()
def test_gradient_checkpointing_gives_the_same_gradients(name, family):
    model = patched(name, family).train()
    reference = gradients(model, input_ids=token_ids())
    model.gradient_checkpointing_enable()
    again = gradients(model, input_ids=token_ids())
    for key, grad in reference.items():
        assert_close(again[key], grad, factor=GRADIENT_FACTOR)


@every_pair()
def test_float64_model(name, family):
    model = patched(name, family)
    single = logits(model, token_ids())
    double = logits(model.double(), token_ids())
    assert double.dtype == torch.float64
    assert_close(single, double)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@every_pair()
def test_half_precision_is_near_float32(name, family, dtype):
    model = patched(name, family)
    batch = padded_batch([token_ids(1, 19)[0], token_ids(1, 7)[0]], "left")
    real = batch["attention_mask"].bool()
    ids = batch.pop("input_ids")
    expected = logits(model, ids, **batch)[real]
    half = logits(copy.deepcopy(model).to(dtype), ids, **batch)
    assert half.dtype == dtype
    assert bool(torch.isfinite(half).all())
    assert relative_error(half[real], expected) < depth_factor(model) * TOLERANCE[dtype]


@every_pair()
def test_autocast_is_near_float32_and_leaves_the_state_in_float32(name, family):
    model = patched(name, family).train()
    expected = model(token_ids()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(token_ids()).logits
    out.float().square().sum().backward()
    assert relative_error(out, expected) < depth_factor(model) * TOLERANCE[torch.bfloat16]
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_kernels_run_under_autocast(monkeypatch):
    """Rotary positions leave queries and keys in float32, and kernels want one dtype of all."""
    model, reasons = patched("window", LLAMA).eval(), []
    original = backends.attend

    def attend(call):
        reasons.append(unsupported_inputs(call, "cpu"))
        return original(call)

    monkeypatch.setattr(backends, "attend", attend)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = output_cache(model(token_ids(), use_cache=True))
    assert reasons == [None, None]
    assert {cache.layers[0].state[name].dtype for name in ("ring_key", "ring_value")} == {torch.bfloat16}


def test_training_with_a_cache_is_warned_of(caplog):
    model, warning = patched("hedgehog", LLAMA), "pass use_cache=False, which is several times faster"
    attention.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        model(token_ids())
        model.train()(token_ids(), use_cache=False)
        assert warning not in caplog.text
        model(token_ids())
    assert warning in caplog.text


@every_pair(DECODERS)
def test_decoding_in_bfloat16_keeps_a_float32_state(name, family):
    model = patched(name, family).bfloat16()
    with torch.no_grad():
        cache = output_cache(model(token_ids(), use_cache=True))
    states = [layer.state for layer in cache.layers]
    # The keys and values of a window and of sinks are stored as they came.
    tokens = ("ring", "sink")
    float_states = [tensor for state in states for key, tensor in state.items() if not key.startswith(tokens)]
    assert all(tensor.dtype == torch.float32 for tensor in float_states if tensor.is_floating_point())


@every_pair()
def test_output_attentions_are_the_weights_of_the_output(name, family):
    model, calls = patched(name, family), []
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, -4:] = 0
    extra = {"use_cache": False} if family.causal else {}
    with torch.no_grad():
        outputs = model(token_ids(), attention_mask=mask, output_attentions=True, **extra)
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 21, 21)] * 2
    with hla.observe_attention(model, calls.append), torch.no_grad():
        model(token_ids(), attention_mask=mask)
    assert_close(outputs.attentions[0], calls[0].linear_weights())
    for call in calls:
        weights, real = call.linear_weights(), call.real_queries()
        value = call.value.repeat_interleave(4 // call.value.shape[1], dim=1)
        assert_close((weights @ value)[real], call.linear_output()[real])
        assert bool((weights.masked_fill(call.allowed, 0.0)[real] == 0).all())


@every_pair()
def test_implied_weights_are_distributions_where_declared(name, family):
    model = patched(name, family)
    module = next(attention_modules(model)).linear_attention
    with torch.no_grad():
        attentions = model(token_ids(), output_attentions=True).attentions
    for weights in attentions if module.distribution else []:
        assert float(weights.min()) >= 0
        assert_close(weights.sum(dim=-1), torch.ones(2, 4, 21))


@every_pair()
def test_observed_models_compute_exact_attention(name, family):
    model = family.build()
    exact = logits(model, token_ids())
    hla.patch_model(model, name, **small_options(ATTENTIONS.get(name).options))
    with hla.exact_attention(model):
        assert torch.equal(logits(model, token_ids()), exact)
    assert relative_error(logits(model, token_ids()), exact) > 0.005


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@every_pair()
def test_exact_layers_of_a_mixture_are_bit_equal(name, family, implementation):
    model = family.build()
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, -3:] = 0
    reference = attention_output(model, 0, token_ids())
    masked = attention_output(model, 0, token_ids(), attention_mask=mask)
    exact = logits(model, token_ids())
    randomize_learned(hla.patch_model(model, mixture(name)))
    assert torch.equal(attention_output(model, 0, token_ids()), reference)
    assert torch.equal(attention_output(model, 0, token_ids(), attention_mask=mask), masked)
    assert relative_error(logits(model, token_ids()), exact) > 1e-3


@every_pair(DECODERS)
def test_a_mixture_decodes_and_generates(name, family):
    model = randomize_learned(hla.patch_model(family.build(), mixture(name)))
    ids = token_ids(2, 12)
    full, cache = logits(model, ids), None
    for step in range(12):
        with torch.no_grad():
            out = model(ids[:, step : step + 1], **cache_argument(model, cache), use_cache=True)
        cache = output_cache(out)
        assert_close(out.logits[:, 0], full[:, step])
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
