"""The feature map of a domain: its weights, state, streams and checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.streaming import read_stream
from recipes.helix import HARMONICS, PERIOD, SEGMENT
from tests.comparing import assert_close, in_pieces, logits
from tests.inputs import padding_mask, qkv, token_ids
from tests.small import mechanism, patched, randomize_learned
from tests.tiny_models import BERT, LLAMA

pytestmark = pytest.mark.usefixtures("with_helix")
SCALING = 0.4
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


@pytest.fixture
def module(with_helix: None) -> Any:
    return randomize_learned(mechanism("helix", causal=True))


def bump(distance: int) -> float:
    """Fejér's kernel as a quotient: its spectrum is not used."""
    angle = math.pi * distance / PERIOD
    return HARMONICS if distance == 0 else (math.sin(HARMONICS * angle) / math.sin(angle)) ** 2 / HARMONICS


def test_the_bump_is_as_wide_as_a_segment():
    assert bump(SEGMENT // 2) == pytest.approx(HARMONICS / 2, rel=0.05)


def definition(module, q, k, real, causal):
    """Normalised weights `[B, H, L, L]` in float64, pair by pair of real tokens."""
    parts = module.feature_map.mix.double().softmax(dim=-1)
    query, key = module.feature_map.fused(SCALING)  # the content
    weights = query.features(q.double()).values @ key.features(k.double()).values.repeat_interleave(2, dim=1).mT
    for row, row_real in enumerate(real.tolist()):
        positions = [sum(row_real[:token]) for token in range(len(row_real))]
        for i, sees in enumerate(row_real):
            for j, seen in enumerate(row_real):
                distance = positions[i] - positions[j]
                kernels = torch.tensor([1, bump(distance), 1 + math.cos(2 * math.pi * distance / 3.6)]).double()
                weights[row, :, i, j] *= (parts @ kernels) * (sees and seen and (j <= i or not causal))
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)


@DIRECTIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_equals_the_definition_under_padding(module, causal, side, small_blocks):
    (q, k, v), mask = qkv(37, dim=6, value_dim=6), padding_mask([37, 21], 37, side)
    inputs = AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask)
    expected, real = definition(module, q, k, mask, causal), mask[:, None].expand(-1, 4, -1)
    assert_close(module.attention_weights(inputs)[real], expected[real])
    assert_close(module(inputs)[0][real], (expected @ v.double().repeat_interleave(2, dim=1))[real])


@pytest.mark.parametrize("sizes", [[1] * 20, [7, 13]])
def test_a_state_in_pieces(module, sizes):
    def run(q, k, v, **settings):
        return module(AttentionInputs(q, k, v, scaling=SCALING, causal=True, return_state=True, **settings))

    inputs, mask = qkv(20, dim=6, value_dim=6), padding_mask([20, 6], 20, "left")
    full, _ = run(*inputs, mask=mask)
    out, state = in_pieces(run, inputs, mask, sizes)
    assert_close(out, full)
    assert state["count"].tolist() == [20, 6]


@pytest.mark.slow
@pytest.mark.parametrize("family", [BERT, LLAMA], ids=str)
def test_save_and_load(family, tmp_path: Path):
    model, ids = patched("helix", family), token_ids()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(hla.load_pretrained(str(tmp_path)), ids), logits(model, ids))


@pytest.mark.slow
def test_a_stream_is_the_whole():
    model, ids = patched("helix", LLAMA), token_ids()[:1]
    pieces = [piece.output.logits for piece in read_stream(model, ids[0].tolist(), chunk_length=5)]
    assert_close(torch.cat(pieces, dim=1), logits(model, ids))


def test_a_window_refuses_a_map_with_positions():
    with pytest.raises(ValueError, match=r"A window cannot use 'helix': .* needs the tokens' positions"):
        hla.patch_model(LLAMA.build(), "window", feature_map="helix")
