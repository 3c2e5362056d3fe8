"""The trainers in two processes on a CPU (gloo): the parameters on each of them, and the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.subprocesses import run_python, torchrun
from tests.training.test_sharding import KINDS

pytestmark = pytest.mark.slow


def run(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The results of both processes."""
    folder.mkdir()
    done = run_python(*torchrun(2), "-m", "tests.training.trainers_worker", kind, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("ddp", tmp_path_factory.mktemp("ddp") / "out")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sharded(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(kind, tmp_path_factory.mktemp(kind) / "out")


def test_losses_are_those_of_data_parallelism(replicated: Any, sharded: Any) -> None:
    for name in ("losses", "evaluations"):
        for expected, actual in zip(replicated[0][name], sharded[0][name], strict=True):
            assert actual == pytest.approx(expected, rel=1e-3)


def test_the_complete_model_is_that_of_data_parallelism(replicated: Any, sharded: Any) -> None:
    for result in sharded:
        assert result["squared_norms"].keys() == replicated[0]["squared_norms"].keys()
        for name, value in replicated[0]["squared_norms"].items():
            assert result["squared_norms"][name] == pytest.approx(value, rel=2e-2, abs=1e-4), name


def test_no_process_holds_a_complete_model(kind: str, sharded: Any) -> None:
    """Neither of the student nor of the teacher, nor in attention transfer."""
    if kind == "zero2":
        pytest.skip("ZeRO-2 shards optimizer states and gradients, not weights")
    for result in sharded:
        sizes = result["sizes"]
        learned = sizes["complete student"] - sizes["complete teacher"]
        assert sizes["student"] < 0.55 * sizes["complete student"]
        assert sizes["teacher"] < 0.55 * sizes["complete teacher"]
        # In attention transfer the learned parts are replicated.
        assert sizes["transfer"] < 0.55 * sizes["complete teacher"] + learned


def test_data_parallelism_replicates(replicated: Any) -> None:
    for result in replicated:
        assert result["sizes"]["teacher"] == result["sizes"]["complete teacher"]
        assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= set(result["checkpoint"])
