"""Decoding steps that are prepared once: what changes between two tokens reaches the next one."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms.base import AttentionInputs
from hf_linear_attn.mechanisms.head_mixture import HeadMixture
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.ops.int8 import to_dtype
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.ops.test_native import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

CASES = {
    "elu": ("elu", {}),
    "hedgehog": ("hedgehog", {}),
    "favor": ("favor+", {"num_features": 40}),  # its weights are copied: the kernels read whole vectors
    "window": ("window", {"window_size": 5, "sink_tokens": 2, "mix_init": 0.0}),
    "hedgehog outside": ("window", {"window_size": 5, "sink_tokens": 2, "feature_map": "hedgehog"}),
    "mixture": ("window", {"window_size": 5, "sink_tokens": 2, "mix_init": 0.0}),
    "mixture of hedgehog": ("hedgehog", {}),
    "int8": ("window", {"window_size": 5, "sink_tokens": 2, "mix_init": 0.0, "cache_dtype": "int8"}),
    "int8 mixture": ("window", {"window_size": 5, "mix_init": 0.0, "cache_dtype": "int8"}),
    "int8 mixture of hedgehog": ("hedgehog", {}),
}
#: The exact heads of mixtures.
EXACT = {"mixture": (1,), "mixture of hedgehog": (0,), "int8 mixture": (1,), "int8 mixture of hedgehog": (0,)}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def build(case: str) -> nn.Module:
    name, options = CASES[case]
    entry = ATTENTIONS.get(name)
    torch.manual_seed(0)
    shape = AttentionShape(6, 3, 32, 32, causal=True)
    built = build_options(entry, options)
    if case in EXACT:
        module = HeadMixture(shape, entry, built, EXACT[case], "int8" if "int8" in case else "auto")
    else:
        module = entry.factory(shape, built)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def tokens(count: int, dtype: torch.dtype = torch.float32, rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, count, 32) for heads in (6, 3, 3))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def step(module: nn.Module, token: tuple[torch.Tensor, ...], state: dict, mask: torch.Tensor | None = None) -> tuple:
    return module(AttentionInputs(*token, 0.2, True, mask, state, return_state=True))


class Decoder:
    """Steps that may be prepared, beside steps whose state is copied, which never are."""

    def __init__(self, case: str, dtype: torch.dtype = torch.float32, rows: int = 2) -> None:
        self.module, self.dtype, self.rows, self.number = build(case).to(dtype), dtype, rows, 0
        _, state = step(self.module, tokens(7, dtype, rows), None)
        self.inplace, self.copied = InPlaceState({name: x.clone() for name, x in state.items()}), state

    def steps(self, count: int, mask: torch.Tensor | None = None) -> None:
        for _ in range(count):
            self.number += 1
            token = tokens(1, self.dtype, self.rows, self.number)
            out, inplace = step(self.module, token, self.inplace, mask)
            expected, self.copied = step(self.module, token, dict(self.copied), mask)
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[self.dtype] * float(expected.abs().max()))
            for name, tensor in self.copied.items():
                scale = max(float(tensor.float().abs().max()), 1e-6)
                torch.testing.assert_close(inplace[name], tensor, rtol=0, atol=TOLERANCE[self.dtype] * scale)
            self.inplace = inplace if isinstance(inplace, InPlaceState) else InPlaceState(inplace)

    @property
    def is_prepared(self) -> bool:
        return self.inplace.prepared is not None


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_prepared_steps_are_those_of_a_copied_state(case: str, dtype: torch.dtype) -> None:
    decoder = Decoder(case, dtype)
    decoder.steps(60)  # the ring moves through its memory more than once
    assert decoder.is_prepared


@pytest.mark.parametrize("case", CASES)
def test_prepared_steps_are_one_pass_of_torch(case: str) -> None:
    module, (query, *stored) = build(case), tokens(40)
    all_tokens = query, *(to_dtype(to_dtype(x, torch.int8), x.dtype) for x in stored)  # int8 loses nothing of them
    with backends.use_backend("torch"):
        expected, _ = step(module, all_tokens, None)
    state = step(module, tuple(x[:, :, :3] for x in all_tokens), None)[1]
    outputs = []
    for position in range(3, 40):
        state = state if isinstance(state, InPlaceState) else InPlaceState(state)
        out, state = step(module, tuple(x[:, :, position : position + 1] for x in all_tokens), state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 2), expected[:, :, 3:], rtol=1e-3, atol=1e-4)


def optimizer_step(decoder: Decoder) -> None:
    parameters = list(decoder.module.parameters())
    if not parameters:
        pytest.skip("nothing is learned")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.3).step()


def change_data(decoder: Decoder) -> None:  # as a merge of LoRA does, past autograd's version counters
    for tensor in (*decoder.module.parameters(), *decoder.module.buffers()):
        tensor.data.mul_(1.5)


def load(decoder: Decoder) -> None:
    decoder.module.load_state_dict({name: -x for name, x in decoder.module.state_dict().items()})


def replace_parameters(decoder: Decoder) -> None:
    for part in decoder.module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter * 2))


def convert_and_back(decoder: Decoder) -> None:
    decoder.module.to(torch.bfloat16).to(torch.float32)


CHANGES = (optimizer_step, change_data, load, replace_parameters, convert_and_back)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", ["favor", "window", "hedgehog", "mixture"])
def test_changed_weights_reach_the_next_token(case: str, dtype: torch.dtype, change: object) -> None:
    if change is convert_and_back and dtype is torch.bfloat16:
        pytest.skip("the same weights")
    decoder = Decoder(case, dtype)
    decoder.steps(3)
    change(decoder)  # type: ignore[operator]
    decoder.steps(3)


def test_changed_options_reach_the_next_token() -> None:
    decoder = Decoder("hedgehog outside")
    decoder.steps(3)
    decoder.module.options = replace(decoder.module.options, saturation=2)
    decoder.steps(2)
    feature_map = decoder.module.feature_map
    feature_map.options = replace(feature_map.options, temperature=0.3)
    decoder.steps(2)
    decoder.module.feature_map = build("hedgehog outside").feature_map
    decoder.steps(2)


def test_a_backend_that_is_set_between_tokens_computes_the_next_one() -> None:
    decoder = Decoder("window")
    decoder.steps(3)
    with backends.use_backend("torch"):
        decoder.steps(2)
        assert not decoder.is_prepared
    decoder.steps(3)
    assert decoder.is_prepared


def test_padding_may_come_and_go() -> None:
    for case in CASES:
        decoder = Decoder(case, rows=3)
        decoder.steps(2)
        decoder.steps(2, torch.tensor([[True], [False], [True]]))
        decoder.steps(1, torch.ones(3, 4, dtype=torch.bool)[:, 2:3])
        decoder.steps(1, torch.tensor([[True]]))
        decoder.steps(2)


def test_another_number_of_rows_is_not_computed_by_the_prepared_step() -> None:
    decoder = Decoder("window", rows=3)
    decoder.steps(3)
    state, prepared = decoder.inplace, decoder.inplace.prepared
    inputs = AttentionInputs(*tokens(1, rows=2), 0.2, True, None, state, return_state=True)
    assert not prepared.matches(decoder.module, inputs)
    full = replace(inputs, **dict(zip(("query", "key", "value"), tokens(1, rows=3), strict=True)))
    assert prepared.matches(decoder.module, full)
    for change in (
        {"scaling": 0.3},
        {"query": full.query.double()},
        {"key": full.key.to(torch.bfloat16)},
        {"value": torch.randn(3, 3, 1, 64)[..., ::2]},
        {"mask": torch.ones(2, 1, dtype=torch.bool)},
        {"mask": torch.ones(3, 1)},
        {"mask": torch.ones(3, 1, 1, 1, dtype=torch.bool)},
        {"return_state": False},
    ):
        assert not prepared.matches(decoder.module, replace(full, **change)), change
    with torch.enable_grad():
        assert not prepared.matches(decoder.module, full)


def test_copies_of_a_state_are_dicts_of_its_size() -> None:
    decoder = Decoder("window")
    decoder.steps(3)
    for copied in (copy.deepcopy(decoder.inplace), pickle.loads(pickle.dumps(decoder.inplace))):
        assert type(copied) is dict
        assert copied["ring_key"].untyped_storage().nbytes() == decoder.inplace["ring_key"].nbytes
        torch.testing.assert_close(copied, dict(decoder.inplace))
