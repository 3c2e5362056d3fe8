"""Processes that are killed, at random moments and at the worst ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.checks import Observed
from tests.subprocesses import ROOT, environment, torchrun
from tests.test_recipes import VERBS, arguments_of
from tests.training.tiny_runs import save_decoder, save_encoder, save_inputs, save_text, weights

#: Steps of every stage, and those between two checkpoints.
STEPS, EVERY = "60", "7"
#: Times that a recipe is killed before it may finish, and runs that are treated so.
KILLS, RUNS = 2, 2
PATIENCE = 240.0


def start(command: Sequence[str], tmp_path: Path) -> subprocess.Popen[bytes]:
    with (tmp_path / "output.txt").open("ab") as output:
        options = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        return subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, **options)


def finish(command: Sequence[str], tmp_path: Path) -> None:
    code = start(command, tmp_path).wait(PATIENCE)
    assert code == 0, (tmp_path / "output.txt").read_text(encoding="utf-8")[-800:]


def kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group, as the kernel or a cluster does: nothing can be done about it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes], nap: float = 0.0005) -> bool:
    """Whether it came about before the process ended."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if there():
            return True
        time.sleep(nap)
    return False


def recipe_command(name: str, tmp_path: Path, out: Path, *more: str) -> list[str]:
    """The recipe with enough steps and checkpoints for a moment to matter."""
    arguments = arguments_of(tmp_path, name, out)
    for at, word in enumerate(arguments):
        if word.endswith(".max_steps"):
            arguments[at + 1] = STEPS
    return ["-m", "hf_linear_attn", *arguments, "--save_steps", EVERY, *more]


def reached(out: Path) -> str:
    """How far a run is, by what lies in its folder."""
    lines = (
        (out / "study" / "records.jsonl").read_text(encoding="utf-8").splitlines()
        if (out / "study" / "records.jsonl").is_file()
        else []
    )
    done = [label for line in lines if (label := json.loads(line).get("label"))]
    steps = sorted(
        (path.stat().st_mtime, f"{path.parent.name} {path.name}") for path in out.glob("checkpoints/*/checkpoint-*")
    )
    return steps[-1][1] if steps else (f"after {done[-1]}" if done else "before the first checkpoint")


# --------------------------------------------------------------------------------------------------------------------
# One process


@pytest.mark.fault(
    group="kill -9",
    what=f"a recipe at random moments, {RUNS} runs, each up to {KILLS} times",
    expected="resumed, the weights of the uninterrupted run",
)
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(VERBS))
def test_killed_at_random(name: str, tmp_path: Path, observed: Observed) -> None:
    save_inputs(tmp_path)
    full = tmp_path / "whole"
    began = time.monotonic()
    process = start(recipe_command(name, tmp_path, full), tmp_path)
    assert wait_for((full / "study" / "records.jsonl").exists, process), (tmp_path / "output.txt").read_text(
        encoding="utf-8"
    )
    begin = time.monotonic() - began
    assert process.wait(PATIENCE) == 0, (tmp_path / "output.txt").read_text(encoding="utf-8")[-800:]
    rest = time.monotonic() - began - begin
    moments = random.Random(name)
    seen = []
    for number in range(RUNS):
        out = tmp_path / f"out-{number}"
        for again in range(KILLS):
            resume = ["--resume"] if again else []
            process = start(recipe_command(name, tmp_path, out, *resume), tmp_path)
            wait_for((out / "study" / "records.jsonl").exists, process)
            time.sleep(begin * bool(again) + moments.uniform(0, rest))
            if process.poll() is None:
                kill(process)
                seen.append(reached(out))
        finish(recipe_command(name, tmp_path, out, "--resume"), tmp_path)
        assert weights(out) == weights(full), f"other weights after kills at {seen}"
    observed(f"the same weights, bit for bit; killed at: {', '.join(seen)}")


@pytest.mark.fault(
    group="kill -9",
    what="while a checkpoint is written",
    expected="the checkpoint before is whole; resumed, the same weights",
)
@pytest.mark.long
def test_killed_while_saving(tmp_path: Path, observed: Observed) -> None:
    save_inputs(tmp_path)
    name = "glue"
    finish(recipe_command(name, tmp_path, tmp_path / "whole"), tmp_path)
    hits = 0
    for attempt in range(6):
        out = tmp_path / f"out-{attempt}"
        stage = out / "checkpoints" / "distill"
        process = start(recipe_command(name, tmp_path, out), tmp_path)

        def half_written(stage: Path = stage) -> bool:
            """The second checkpoint is begun and has no name yet."""
            return any(stage.glob("checkpoint-*")) and any(path.is_dir() for path in stage.glob(".checkpoint-*.part"))

        if not wait_for(half_written, process):
            process.wait()
            continue
        kill(process)
        hits += any(stage.glob(".checkpoint-*.part"))
        saved = sorted(stage.glob("checkpoint-*"))
        assert saved, "no checkpoint is left"
        assert all((path / "trainer_state.json").is_file() for path in saved), saved
        finish(recipe_command(name, tmp_path, out, "--resume"), tmp_path)
        assert weights(out) == weights(tmp_path / "whole")
        assert not list(out.rglob("*.part")), "leftovers stay after the resumed run"
        if hits == 2:
            break
    assert hits, "no kill fell into the writing of a checkpoint"
    observed(f"{hits} kills found a half-written checkpoint aside; the same weights")


@pytest.mark.fault(
    group="kill -9",
    what="`patch --overwrite` while it replaces a checkpoint",
    expected="the old checkpoint or the new one, whole",
)
@pytest.mark.long
def test_patch_killed_while_replacing(tmp_path: Path, observed: Observed) -> None:
    import hf_linear_attn as hla
    from hf_linear_attn.utils.files import remove_partial_files

    save_encoder(tmp_path / "source", head=True)
    target = tmp_path / "target"
    command = ["-m", "hf_linear_attn", "patch", str(tmp_path / "source"), str(target), "--overwrite", "--attention"]
    finish([*command, "elu"], tmp_path)
    seen = []
    for moment in ("begun", "written", "begun"):
        process = start([*command, "hedgehog"], tmp_path)

        def due(moment: str = moment) -> bool:
            parts = list(tmp_path.glob(".target.*.part"))
            return any(moment == "begun" or (part / "model.safetensors").exists() for part in parts)

        wait_for(due, process)
        if process.poll() is None:
            kill(process)
        remove_partial_files(tmp_path)
        loaded = hla.load_pretrained(str(target))
        seen.append(hla.patch_report(loaded).layers[0].attention)
    assert set(seen) <= {"elu", "hedgehog"}, seen
    observed(f"what was there after each kill: {', '.join(seen)}")


@pytest.mark.fault(
    group="kill -9", what="`plan`, at random moments", expected="taken up again, it ends with the same plan"
)
@pytest.mark.long
def test_plan_killed(tmp_path: Path, observed: Observed) -> None:
    save_decoder(tmp_path / "decoder")
    text = save_text(tmp_path / "text", 400)
    flags = ["--data.max_length", "32", "--steps", "4", "--quick", "--attention", "hedgehog", "--speed.lengths", "64"]
    command = ["-m", "hf_linear_attn", "plan", str(tmp_path / "decoder"), "--budget", "50% cache at 64", *flags]
    command += ["--data.dataset", str(text), "--resume", "--output"]
    began = time.monotonic()
    process = start([*command, str(tmp_path / "whole")], tmp_path)
    assert process.wait(PATIENCE) in (0, 1), (tmp_path / "output.txt").read_text(encoding="utf-8")[-800:]
    length = time.monotonic() - began
    moments = random.Random("plan")
    for _ in range(3):
        process = start([*command, str(tmp_path / "out")], tmp_path)
        time.sleep(moments.uniform(0.5, 1.0) * length)
        if process.poll() is None:
            kill(process)
    assert start([*command, str(tmp_path / "out")], tmp_path).wait(PATIENCE) in (0, 1)
    plans = [(tmp_path / name / "plan.json").read_bytes() for name in ("whole", "out")]
    assert plans[0] == plans[1]
    observed("the same plan.json, byte for byte")


# --------------------------------------------------------------------------------------------------------------------
# Two processes


def two_processes(tmp_path: Path, out: Path, *more: str) -> list[str]:
    return [*torchrun(2), *recipe_command("glue", tmp_path, out, *more)]


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the launcher's children."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text(encoding="utf-8").split()]


@pytest.mark.fault(
    group="kill -9",
    what="one of two processes dies",
    expected="the other ends too, with a message; resumed, the same weights",
)
@pytest.mark.long
def test_a_worker_dies(tmp_path: Path, observed: Observed) -> None:
    save_inputs(tmp_path)
    finish(two_processes(tmp_path, tmp_path / "whole"), tmp_path)
    out = tmp_path / "out"
    process = start(two_processes(tmp_path, out), tmp_path)
    stage = out / "checkpoints" / "distill"
    assert wait_for(lambda: any(stage.glob("checkpoint-*")), process), (tmp_path / "output.txt").read_text(
        encoding="utf-8"
    )
    alive = workers(process)
    assert len(alive) == 2, alive
    began = time.monotonic()
    os.kill(alive[1], signal.SIGKILL)
    code = process.wait(PATIENCE)
    seconds = time.monotonic() - began
    output = (tmp_path / "output.txt").read_text(encoding="utf-8")
    assert code != 0
    assert "exitcode: -9" in output.replace(" ", "").replace("exitcode:-9", "exitcode: -9"), output[-800:]
    assert not any(Path(f"/proc/{number}").exists() for number in alive), "a worker is still there"
    finish(two_processes(tmp_path, out, "--resume"), tmp_path)
    assert weights(out) == weights(tmp_path / "whole")
    observed(
        f"the other process was gone after {seconds:.0f} s, exit code {code}, `exitcode: -9` told; the same weights"
    )
