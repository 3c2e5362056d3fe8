"""The verdicts, the Pareto front, what is kept, means over seeds, checkpoints that belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, BertModel

import hf_linear_attn as hla
from hf_linear_attn.evaluation.advice import advise, nearest_length, pareto_front
from hf_linear_attn.evaluation.averages import mean_of, spread_of
from hf_linear_attn.evaluation.pointers import joined, resolve
from hf_linear_attn.evaluation.scores import kept, score_of, scores_of
from hf_linear_attn.evaluation.subject import find_groups, longer_layers
from tests.evaluation.made_up import made_up_evaluation
from tests.helpers import tiny_config, tiny_model

# --------------------------------------------------------------------------------------------------------------------
# Advice


def point(speedup: float, goodness: float, state: str = "trained") -> dict[str, Any]:
    return {"speedup": speedup, "goodness": goodness, "state": state}


def test_pareto_front() -> None:
    points = [point(1, 10), point(2, 8), point(2, 9), point(3, 5), point(1.5, 8.5), point(9, 20, "control")]
    assert pareto_front(points) == [True, False, True, True, False, False]
    assert pareto_front([point(1, 1), point(1, 1)]) == [True, True]


def verdict_of(share: float, speedup: float, **changes: Any) -> dict[str, Any]:
    """The verdict on elu with this share of the reference's score and this speedup at 512 tokens."""
    report = made_up_evaluation("classifier")
    report["text"]["judged"] = {"task": changes.get("judged", 512)}
    report["mechanisms"][0]["untrained"]["task"]["score"] = share * report["reference"]["quality"]["task"]["score"]
    report["control"]["task"]["score"] = changes.get("off", 0.1)
    report["speed"]["model"]["rows"]["elu"][1]["speedup"] = speedup
    return advise(report)["verdicts"][0]


@pytest.mark.parametrize(
    ("share", "speedup", "changes", "call", "good"),
    [
        (0.99, 2.0, {}, "worth it", True),
        (0.95, 2.0, {}, "at a price", None),
        (0.5, 2.0, {}, "loses too much", False),
        (0.99, 2.0, {"off": 0.9}, "loses too much", False),
        (0.99, 1.0, {}, "no gain", False),
        (0.99, 0.5, {}, "slower", False),
        (0.99, 2.0, {"judged": 200}, "worth it, as far as shorter inputs show", None),
    ],
)
def test_verdicts(share: float, speedup: float, changes: dict[str, Any], call: str, good: bool | None) -> None:
    found = verdict_of(share, speedup, **changes)
    assert call in found["call"]
    assert found["good"] is good
    assert f"at 512 tokens {speedup:.2f}× as fast as sdpa" in found["words"]
    assert found["kept"] == pytest.approx(share)


def test_the_length_of_the_verdict() -> None:
    assert nearest_length([128, 512, 2048], 600) == 512
    assert nearest_length([128, 512, 2048], None) == 2048
    assert nearest_length([], 600) is None
    report = made_up_evaluation()
    report["speed"]["model"].update(lengths=[], rows={})
    assert advise(report) == {"length": None, "points": [], "verdicts": []}


@pytest.mark.parametrize(
    ("kind", "title", "share"), [("classifier", "sst2 accuracy", 0.71 / 0.8), ("encoder", "STS-B Spearman", 0.81 / 0.9)]
)
def test_scores(kind: str, title: str, share: float) -> None:
    report = made_up_evaluation(kind)
    assert score_of(report).title == title
    assert kept(report, report["mechanisms"][-1]["trained"]) == pytest.approx(share)
    assert kept(report, None) is None


def test_score_of_a_decoder_is_its_perplexity() -> None:
    report = made_up_evaluation("decoder")
    assert [score.title for score in scores_of(report)] == ["perplexity"]
    own, reference = report["mechanisms"][0]["untrained"], report["reference"]["quality"]
    expected = reference["perplexity"]["perplexity"] / own["perplexity"]["perplexity"]
    assert kept(report, own) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------------------
# Seeds


def test_mean_and_spread() -> None:
    found: list[dict[str, Any]] = [
        {"a": 1.0, "n": 3, "rows": [{"kl": [0.0, 2.0], "name": "x"}], "none": None, "ok": True},
        {"a": 2.0, "n": 3, "rows": [{"kl": [1.0, 2.0], "name": "x"}], "none": 0.5, "ok": True},
    ]
    mean = {"a": 1.5, "n": 3, "rows": [{"kl": [0.5, 2.0], "name": "x"}], "none": None, "ok": True}
    assert mean_of(found) == mean
    assert spread_of(found) == {"a": pytest.approx(0.5**0.5), "n": 0.0}
    assert mean_of(found[:1]) is found[0]
    assert spread_of(found[:1]) is None


# --------------------------------------------------------------------------------------------------------------------
# Pointers and groups


def test_pointers() -> None:
    data = {"a/b": [{"c~d": 7}]}
    assert joined("a/b", 0, "c~d") == "/a~1b/0/c~0d"
    assert resolve(data, "/a~1b/0/c~0d") == 7
    assert resolve(data, "") is data
    for wrong in ("/x", "/a~1b/1", "/a~1b/x", "/a~1b/0/c~0d/e"):
        with pytest.raises(LookupError):
            resolve(data, wrong)


def test_checkpoints_that_differ_in_weights_and_seeds_belong_together(tmp_path: Path) -> None:
    for name, attention, options in (
        ("a", "favor+", {"seed": 1, "num_features": 8}),
        ("b", "favor+", {"seed": 2, "num_features": 8}),
        ("c", "favor+", {"seed": 2, "num_features": 16}),
        ("d", "linformer", {"num_slots": 4}),
    ):
        model = tiny_model("bert", BertModel)
        hla.patch_model(model, attention, **options).save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in "abcd"]
    groups = find_groups(folders, AutoModel, tiny_config("bert"), "cpu", exact=False)
    assert [(group.name, [member.folder for member in group.members]) for group in groups] == [
        ("favor+ (converted)", ["a", "b"]),
        ("favor+ (converted) 2", ["c"]),
        ("linformer (converted)", ["d"]),
    ]
    assert len({member.fingerprint for group in groups for member in group.members}) == 4
    assert hla.is_patched(groups[0].members[0].load())
    longer = longer_layers(groups[2].layers, 4096)
    assert {held["options"]["max_length"] for held in longer.values()} == {4096}
