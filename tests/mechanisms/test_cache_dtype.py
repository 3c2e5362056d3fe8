"""`cache_dtype="int8"`: what a state stores of single tokens is rounded once, and everything else is as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_linear_attn as hla
from hf_linear_attn.config import LayerConfig
from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.head_mixture import HeadMixture
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.ops.int8 import to_dtype
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import assert_close, logits, relative_error
from tests.inputs import padding_mask, qkv
from tests.mechanisms import checks
from tests.reference import naive
from tests.small import patched
from tests.tiny_models import BERT, LLAMA

SCALING = checks.SCALING
SIZES: dict[str, Any] = {"heads": 6, "groups": 3, "dim": 16, "value_dim": 16}
PIECES = {"steps": [30, *[1] * 25], "chunks": [3, 40, 2, 1, 1, 30, 1], "one by one": [1] * 30}
BACKENDS = pytest.mark.parametrize("backend", ["auto", "torch"])
EVERY_PIECES = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
#: What rounding all stored tokens may change, of the largest output; logits of drawn keys have a deviation of 1.6.
ROUNDING = 2e-2


def build(exact_heads: tuple[int, ...] = (), name: str = "window", cache_dtype: str = "int8", **options: Any) -> Any:
    entry = ATTENTIONS.get(name)
    if name == "window":
        options = {"window_size": 5, "sink_tokens": 2, "mix_init": 0.5, "saturation": None, **options}
        options |= {"feature_map": options.get("feature_map", "hedgehog"), "cache_dtype": cache_dtype}
    shape = AttentionShape(6, 3, 16, 16, layer_index=1, max_length=2048, causal=True)
    built = build_options(entry, options)
    module = HeadMixture(shape, entry, built, exact_heads, cache_dtype) if exact_heads else entry.factory(shape, built)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.requires_grad_(False)


def on_the_grid(inputs: list[Tensor]) -> list[Tensor]:
    """Queries, and keys and values that int8 stores without a loss."""
    query, *tokens = inputs
    return [query, *(to_dtype(to_dtype(x, torch.int8), x.dtype) for x in tokens)]


def run(
    module: Any, inputs: list[Tensor], pieces: list[int], mask: Tensor | None = None, inplace: bool = True
) -> tuple[Tensor, Any]:
    """The outputs of a sequence in pieces, and the last state; steps write over the state before them."""
    state, outputs, start = None, [], 0
    for size in pieces:
        now = slice(start, start + size)
        tokens = [x[:, :, now] for x in inputs]
        part = None if mask is None else mask[:, now]
        out, state = module(AttentionInputs(*tokens, SCALING, True, part, state, return_state=True))
        if inplace and not isinstance(state, InPlaceState):
            state = InPlaceState(state)
        outputs.append(out)
        start += size
    return torch.cat(outputs, dim=2), state


def versions(x: Tensor, pieces: list[int], row: int, delay: int) -> Tensor:
    """Tokens `[…, :row + 1, d]` as row `row` sees them: exact if the call that brought them also has the row `delay`
    later, or `row` if that is sooner."""
    ends = torch.tensor(pieces).cumsum(0)
    call = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
    read = (torch.arange(row + 1) + delay).clamp(max=row)
    exact = call[: row + 1] == call[read]
    rounded = to_dtype(to_dtype(x, torch.int8), x.dtype)
    return torch.where(exact[:, None], x[:, :, : row + 1], rounded[:, :, : row + 1])


def window_definition(module: Any, inputs: list[Tensor], pieces: list[int]) -> Tensor:
    """Each row by itself: it sees tokens in the window as its call does, and others as they left the window."""
    query, key, value = inputs
    options, rows = module.options, []
    heads, groups = query.shape[1], key.shape[1]
    for row in range(query.shape[2]):
        near_key, near_value = (versions(x, pieces, row, row) for x in (key, value))
        far_key, far_value = (versions(x, pieces, row, options.window_size) for x in (key, value))
        one = query[:, :, row : row + 1]
        inside = torch.arange(row + 1) > row - options.window_size
        inside = inside | (torch.arange(row + 1) < options.sink_tokens)
        exact = one @ naive.repeat_heads(near_key, heads).mT * SCALING
        exact = (exact - exact[..., inside].amax(dim=-1, keepdim=True)).exp()
        phi_q, phi_k = module.feature_map.query(one, SCALING).values, module.feature_map.key(far_key, SCALING).values
        mix = module.log_mix.view(-1, 1) + SCALING**0.5 * (one * module.mix_weight.unsqueeze(1)).sum(-1)
        linear = phi_q @ naive.repeat_heads(phi_k, heads).mT * mix.unsqueeze(-1).exp()
        both = torch.cat([exact[..., inside], linear[..., ~inside]], dim=-1)
        seen = torch.cat([near_value[:, :, inside], far_value[:, :, ~inside]], dim=2)
        rows.append(naive.normalise(both, seen))
    assert groups * 2 == heads
    return torch.cat(rows, dim=2)


def exact_definition(inputs: list[Tensor], pieces: list[int], heads: list[int]) -> Tensor:
    query, key, value = (x.unflatten(1, (3, -1))[:, heads].flatten(1, 2) for x in inputs)
    rows = []
    for row in range(query.shape[2]):
        seen = (versions(x, pieces, row, row) for x in (key, value))
        allowed = torch.ones(1, row + 1, dtype=torch.bool)
        rows.append(naive.softmax_attention(query[:, :, row : row + 1], *seen, allowed, SCALING))
    return torch.cat(rows, dim=2)


@BACKENDS
@EVERY_PIECES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_windows_see_rounded_tokens_of_earlier_calls(dtype: torch.dtype, pieces: list[int], backend: str) -> None:
    module, inputs = build().to(dtype), [x.to(dtype) for x in qkv(sum(pieces), batch=2, **SIZES)]
    with hla.use_backend(backend):
        out, state = run(module, inputs, pieces)
    expected = window_definition(checks.double(module), [x.double() for x in inputs], pieces)
    assert_close(out, expected, dtype)
    assert {name: state[name].dtype for name in ("ring_key", "sink_value", "kv")} == {
        "ring_key": torch.int8,
        "sink_value": torch.int8,
        "kv": dtype,
    }


@BACKENDS
@EVERY_PIECES
@pytest.mark.parametrize("name", ["window", "elu"])
def test_exact_heads_see_rounded_tokens_of_earlier_calls(name: str, pieces: list[int], backend: str) -> None:
    module, inputs = build((0, 2), name), qkv(sum(pieces), batch=2, **SIZES)
    with hla.use_backend(backend):
        out, state = run(module, inputs, pieces)
    expected = exact_definition([x.double() for x in inputs], pieces, [0, 2])
    assert_close(out[:, [0, 1, 4, 5]], expected)
    assert state["exact_key"].dtype is state["exact_value"].dtype is torch.int8


CASES: dict[str, Any] = {
    "window": {},
    "codes": {"feature_map": "vq"},
    "log scale": {"feature_map": "favor+"},
    "no sinks": {"sink_tokens": 0},
    "saturation": {"saturation": 4},
    "mixture": {"exact_heads": (1,)},
    "mixture of two": {"exact_heads": (0, 1)},
    "mixture of elu": {"name": "elu", "exact_heads": (1,)},
}


@BACKENDS
@EVERY_PIECES
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_that_lose_nothing_are_as_without_int8(
    case: str, padding: bool, pieces: list[int], backend: str
) -> None:
    inputs, mask = on_the_grid(qkv(sum(pieces), batch=2, **SIZES)), None
    if padding:
        mask = padding_mask([sum(pieces), sum(pieces) // 3], sum(pieces), "left")
        inputs = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in inputs]
    with hla.use_backend(backend):
        out, state = run(build(**CASES[case]), inputs, pieces, mask)
    expected, state_before = run(build(**CASES[case], cache_dtype="auto"), inputs, pieces, mask, inplace=False)
    real = slice(None) if mask is None else mask[:, None, :, None].expand(out.shape)
    assert_close(out[real], expected[real])
    for name, tensor in state_before.items():
        stored = to_dtype(state[name], tensor.dtype)
        if name.startswith("ring") and tensor.dim() == 4:  # which may hold anything where there is no token
            stored, tensor = (
                x * state_before["ring_mask"][:, None, :, None] for x in (stored.nan_to_num(), tensor.nan_to_num())
            )
        assert_close(stored, tensor)


@pytest.mark.parametrize("case", ["window", "mixture"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_prompt_is_exact_and_decoding_rounds(dtype: torch.dtype, case: str) -> None:
    """Decoding equals the prompt in one piece up to `ROUNDING`, and differs by some of it."""
    inputs = [x.to(dtype) for x in qkv(140, batch=2, **SIZES)]
    module, exact = build(**CASES[case]).to(dtype), build(**CASES[case], cache_dtype="auto").to(dtype)
    prompt, _ = run(module, inputs, [140])
    assert torch.equal(prompt, run(exact, inputs, [140])[0])
    error = relative_error(run(module, inputs, [60, *[1] * 80])[0], prompt)
    assert (0 if dtype is torch.bfloat16 else 1e-4) < error < ROUNDING + (4e-2 if dtype is torch.bfloat16 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pieces", [[20, *[3] * 12], [20, *[1] * 36]], ids=["chunks", "steps"])
def test_a_token_is_rounded_once(pieces: list[int], dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in qkv(56, batch=2, **SIZES)]
    module = build(window_size=64, sink_tokens=3, exact_heads=(1,)).to(dtype)
    mask = padding_mask([56, 31], 56, "left")
    for padding in (None, mask):
        with hla.use_backend("torch"):
            _, state = run(module, inputs, pieces, padding)
        real = torch.ones(2, 56, dtype=torch.bool) if padding is None else padding
        for name, of, heads in (("key", inputs[1], [0, 2]), ("value", inputs[2], [0, 2])):
            ring = state[f"ring_{name}"][:, :, -56:]
            once = to_dtype(of[:, heads], torch.int8)
            assert all(torch.equal(ring[row][:, real[row]], once[row][:, real[row]]) for row in range(2))
            exact = state[f"exact_{name}"]
            once = to_dtype(of[:, [1]], torch.int8)
            assert all(torch.equal(exact[row][:, real[row]], once[row][:, real[row]]) for row in range(2))


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_the_state(case: str) -> None:
    int8, auto = build(**CASES[case]), build(**CASES[case], cache_dtype="auto")
    inputs = qkv(100, batch=1, **SIZES)
    for module in (int8, auto):
        state = run(module, inputs, [100])[1]
        assert module.state_bytes(100) == sum(x.nbytes for name, x in state.items() if name != "exact_mask")
    heads = len(CASES[case].get("exact_heads", ()))
    window = CASES[case].get("name") is None
    tokens = heads * 100
    if window:
        sizes = 5 + CASES[case].get("sink_tokens", 2)
        tokens += (3 - heads) * sizes
    assert auto.state_bytes(100) - int8.state_bytes(100) == tokens * 2 * (16 * 4 - (16 + 4))


@pytest.mark.parametrize("case", ["window", "mixture"])
def test_gradients_through_a_carried_state_are_as_without_int8(case: str) -> None:
    inputs = qkv(60, batch=2, **SIZES)
    gradients = []
    for cache_dtype in ("int8", "auto"):
        module = build(**CASES[case], cache_dtype=cache_dtype).requires_grad_()
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, state = run(module, leaves, [30, 20, 10], inplace=False)
        assert all(x.dtype is not torch.int8 for x in state.values())
        gradients.append(torch.autograd.grad(out.square().sum(), [*leaves, *module.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_gradients_may_begin_after_a_prompt_that_is_stored_in_int8() -> None:
    module, inputs = build((1,)).requires_grad_(), qkv(60, batch=2, **SIZES)
    with torch.no_grad():
        _, state = run(module, inputs, [30])
    leaves = [x[:, :, 30:].clone().requires_grad_() for x in inputs]
    out, after = module(AttentionInputs(*leaves, SCALING, True, None, dict(state), return_state=True))
    assert after["exact_key"].dtype is torch.float32
    assert after["exact_key"].shape[3] == 16
    torch.autograd.grad(out.sum(), leaves)
    with torch.no_grad():  # and end
        out, after = module(AttentionInputs(*leaves, SCALING, True, None, after, return_state=True))
    assert after["exact_key"].dtype is after["ring_key"].dtype is torch.int8


@pytest.mark.parametrize("options", [{}, {"exact_heads": [0]}], ids=["all", "exact heads"])
@pytest.mark.parametrize("attention", ["window", "hedgehog"])
def test_other_values_are_refused(attention: str, options: dict[str, Any]) -> None:
    message = r"cache_dtype must be one of 'auto', 'int8', got 'int4'\."
    if attention == "hedgehog" and not options:
        message = "Unknown option 'cache_dtype' for 'hedgehog'"
    with pytest.raises(ValueError, match=message):
        hla.patch_model(LLAMA.build(), attention, cache_dtype="int4", **options)


def test_encoders_have_no_cache_to_round() -> None:
    ids = torch.arange(2, 30)[None]
    rounded, exact = (patched("window", BERT, cache_dtype=dtype) for dtype in ("int8", "auto"))
    rounded.load_state_dict(exact.state_dict())
    assert torch.equal(logits(rounded, ids), logits(exact, ids))


@pytest.mark.parametrize("attention", ["window", "hedgehog"])
def test_the_option_is_saved_and_reported(attention: str, tmp_path: Any) -> None:
    layer = {"attention": attention, "exact_heads": [1], "cache_dtype": "int8"}
    model = patched(attention, LLAMA, cache_dtype="int8", exact_heads=[1])
    assert all(row.options["cache_dtype"] == "int8" for row in hla.patch_report(model).layers)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["linear_attention"]
    assert [layer["options"]["cache_dtype"] for layer in saved["layers"].values()] == ["int8"] * 2
    loaded = hla.load_pretrained(tmp_path)
    assert hla.patch_report(loaded) == hla.patch_report(model)
    assert [module.cache_dtype for module in loaded.modules() if isinstance(module, HeadMixture)] == ["int8"] * 2
    assert LayerConfig.parse(layer).options["cache_dtype"] == "int8"
