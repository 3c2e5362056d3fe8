"""Every comparison with another package that is installed here, and that the reasons given for differences hold."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_linear_attn as hla
from tests.comparing import relative_error
from tests.peers import fast, fla, low_rank, performer  # noqa: F401  (the comparisons add themselves)
from tests.peers.comparing import CLEAR, COMPARISONS, LENGTH, SEED, Comparison, inputs, measure

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda item: f"{item.package.name}-{item.run.__name__}")
def test_beside_another_package(comparison: Comparison, record_property: Any) -> None:
    row = {"package": comparison.package.name, "mechanism": comparison.mechanism, "case": comparison.case}
    record_property("comparison", json.dumps(row))
    reason = f"{comparison.package.name} is not installed, or misses something: {comparison.package.install}"
    for module in comparison.modules:
        pytest.importorskip(module, reason=reason, exc_type=ImportError)
    result = measure(comparison)
    row |= {"package_version": version(comparison.package.name), "our_version": hla.__version__, "seed": SEED}
    row |= {"dtype": str(comparison.dtype).removeprefix("torch."), **result, "why": comparison.differs}
    record_property("comparison", json.dumps(row))
    assert result["ours_to_definition"] <= comparison.tolerance
    if comparison.differs:
        assert result["verdict"] == "different"
        assert result["theirs_to_definition"] > CLEAR * comparison.tolerance
    else:
        assert result["verdict"] == "equal", result
        assert result["theirs_to_definition"] <= comparison.tolerance


@torch.no_grad()
def test_a_later_key_changes_the_past_of_performer_pytorch_and_not_ours() -> None:
    pytest.importorskip("performer_pytorch", reason=f"performer-pytorch: {performer.PERFORMER.install}")
    short, long = performer.causal_pair(1.0), performer.causal_pair(6.0)
    assert torch.equal(short.ours, long.ours)
    assert relative_error(long.theirs, short.theirs) > 0.1
    # Not merely changed: nothing of the keys is left. (Some 1e-6 in the normaliser shrinks the first outputs besides.)
    averages = performer.averages(inputs()[2])[:, :, 10:-1]
    assert relative_error(long.theirs[:, :, 10:], averages) < 0.02
    assert relative_error(short.theirs[:, :, 10:], averages) > 0.1


@torch.no_grad()
def test_linformer_swallows_a_mask() -> None:
    pytest.importorskip("linformer", reason=f"linformer: {low_rank.LINFORMER.install}")
    layer, x = low_rank.layer(), low_rank.tokens()
    mask = torch.arange(LENGTH).expand(len(x), -1) < LENGTH - 12
    assert torch.equal(layer(x, mask=mask), layer(x))


@torch.no_grad()
def test_fast_transformers_stabilizer_is_exact_without_epsilon() -> None:
    pytest.importorskip(fast.MODULE, reason=f"fast-transformers: {fast.FAST.install}", exc_type=ImportError)
    outputs = fast.favor_plus(1.0, torch.float64, 0.0, stabilize=True)
    assert relative_error(outputs.theirs, outputs.definition) < 1e-10
    short = fast.favor_plus(1.0, torch.float64, 1e-6, stabilize=True)
    assert bool((short.theirs.abs() <= short.definition.abs()).all())


@torch.no_grad()
def test_fast_transformers_gives_zeros_where_features_underflow() -> None:
    pytest.importorskip(fast.MODULE, reason=f"fast-transformers: {fast.FAST.install}", exc_type=ImportError)
    outputs = fast.favor_plus(6.0, torch.float32, 1e-6)
    zeros = (outputs.theirs == 0).all(dim=-1)
    assert bool(zeros.any())
    assert not bool((outputs.ours == 0).all(dim=-1).any())


def test_every_comparison_has_a_committed_result() -> None:
    results = ROOT / "recipes" / "results" / "packages.json"
    if not results.is_file():
        pytest.skip("needs the repository, and runs outside of it")
    report = json.loads(results.read_text(encoding="utf-8"))
    known = {(c.package.name, c.mechanism, c.case) for c in COMPARISONS}
    assert {(r["package"], r["mechanism"], r["case"]) for r in report["comparisons"] + report["not_run"]} == known
