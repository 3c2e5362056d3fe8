"""The registry as test cases: parametrizations over every mechanism, feature map, family and direction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from hf_linear_attn.mechanisms.softmax import EXACT
from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS, AttentionEntry
from tests.tiny_models import FAMILIES, Family


def entries() -> list[AttentionEntry]:
    """Every registered mechanism that is not exact attention itself."""
    return [entry for name, entry in sorted(ATTENTIONS) if name != EXACT]


def serves(entry: AttentionEntry, causal: bool) -> bool:
    return entry.causal if causal else entry.bidirectional


def every_pair(
    families: Sequence[Family] = FAMILIES,
    quick: Collection[tuple[str, Family]] | None = None,
    slow: Collection[str] | None = None,
) -> Any:
    """Parametrize a test over `name, family` for every mechanism and every family that it serves.

    quick: the pairs of the quick suite, where a test is expensive; the others are slow. (See `tests/sampling.py`, too.)
    slow: the mechanisms whose pairs are slow; all others are long.
    """
    cases = []
    for entry in entries():
        for family in families:
            if serves(entry, family.causal):
                is_quick = quick is None or (entry.name, family) in quick
                marker = pytest.mark.slow if slow is None or entry.name in slow else pytest.mark.long
                marks = () if is_quick else (marker,)
                cases.append(pytest.param(entry.name, family, id=f"{entry.name}-{family}", marks=marks))
    return pytest.mark.parametrize(("name", "family"), cases)


def every_refused_pair() -> Any:
    cases = [(entry.name, family) for entry in entries() for family in FAMILIES if not serves(entry, family.causal)]
    return pytest.mark.parametrize(("name", "family"), cases, ids=[f"{name}-{family}" for name, family in cases])


def every_mechanism(*, causal: bool) -> Any:
    """Parametrize a test over the `name` of every mechanism that serves the direction."""
    return pytest.mark.parametrize("name", [entry.name for entry in entries() if serves(entry, causal)])


def every_direction() -> Any:
    """Parametrize a test over `name, causal` for every mechanism and direction."""
    cases = [(entry.name, causal) for entry in entries() for causal in (False, True) if serves(entry, causal)]
    return pytest.mark.parametrize(
        ("name", "causal"), cases, ids=[f"{n}-{'causal' if c else 'both'}" for n, c in cases]
    )


def every_feature_map(*, signed: bool = True) -> Any:
    """Every map; `signed=False` leaves out those whose weights can be negative."""
    names = sorted(name for name, entry in FEATURE_MAPS if signed or not entry.factory.signed)
    return pytest.mark.parametrize("name", names)
