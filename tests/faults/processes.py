"""Processes that are killed, at random moments and at the worst ones."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.faults.trying import fault
from tests.test_recipes import SCRIPTS, words
from tests.training.made_up import save_decoder, save_encoder, save_task, save_text

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
#: Steps of every stage, and those between two checkpoints.
STEPS, EVERY = "60", "7"
#: Times that a recipe is killed before it may finish, and runs that are treated so.
KILLS, RUNS = 2, 2
PATIENCE = 240.0


def start(command: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    with (place / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )


def finish(command: Sequence[str], place: Path) -> None:
    code = start(command, place).wait(PATIENCE)
    assert code == 0, (place / "output.txt").read_text(encoding="utf-8")[-800:]


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


def recipe_command(name: str, place: Path, out: Path, *more: str) -> list[str]:
    """The recipe with enough steps and checkpoints for a moment to matter."""
    given = words(place, name, out)
    for at, word in enumerate(given):
        if word.endswith(".steps"):
            given[at + 1] = STEPS
    return [str(ROOT / "recipes" / f"{name}.py"), *given, "--run.checkpoint_every", EVERY, *more]


def inputs(place: Path) -> None:
    save_encoder(place / "encoder")
    save_decoder(place / "decoder")
    save_task(place / "task")
    save_text(place / "text")


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def reached(out: Path) -> str:
    """How far a run is, by what lies in its folder."""
    state = out / "state.json"
    done = list(json.loads(state.read_text(encoding="utf-8"))) if state.is_file() else []
    steps = sorted(
        (path.stat().st_mtime, f"{path.parent.name} {path.name}") for path in out.glob("checkpoints/*/step-*")
    )
    return steps[-1][1] if steps else (f"after {done[-1]}" if done else "before the first checkpoint")


# --------------------------------------------------------------------------------------------------------------------
# One process


def killed_at_random(name: str, place: Path) -> str:
    inputs(place)
    whole = place / "whole"
    began = time.monotonic()
    process = start(recipe_command(name, place, whole), place)
    assert wait_for((whole / "settings.json").exists, process), (place / "output.txt").read_text(encoding="utf-8")
    begin = time.monotonic() - began
    assert process.wait(PATIENCE) == 0, (place / "output.txt").read_text(encoding="utf-8")[-800:]
    rest = time.monotonic() - began - begin
    moments = random.Random(name)
    seen = []
    for number in range(RUNS):
        out = place / f"out-{number}"
        for again in range(KILLS):
            resume = ["--run.resume", "true"] if again else []
            process = start(recipe_command(name, place, out, *resume), place)
            wait_for((out / "settings.json").exists, process)
            time.sleep(begin * bool(again) + moments.uniform(0, rest))
            if process.poll() is None:
                kill(process)
                seen.append(reached(out))
        finish(recipe_command(name, place, out, "--run.resume", "true"), place)
        assert weights(out) == weights(whole), f"other weights after kills at {seen}"
    return f"the same weights, bit for bit; killed at: {', '.join(seen)}"


for recipe in sorted(SCRIPTS):
    fault(
        "kill -9",
        f"recipe {recipe}.py, at random moments, {RUNS} runs, each up to {KILLS} times",
        "resumed, the weights of the uninterrupted run",
        quick=False,
    )(partial(killed_at_random, recipe))


@fault(
    "kill -9", "while a checkpoint is written", "the checkpoint before is whole; resumed, the same weights", quick=False
)
def killed_while_saving(place: Path) -> str:
    inputs(place)
    name = "glue"
    finish(recipe_command(name, place, place / "whole"), place)
    hits = 0
    for attempt in range(6):
        out = place / f"out-{attempt}"
        stage = out / "checkpoints" / "distill"
        process = start(recipe_command(name, place, out), place)

        def half_written(stage: Path = stage) -> bool:
            """The second checkpoint is begun and has no name yet."""
            return any(stage.glob("step-*")) and any(path.is_dir() for path in stage.glob(".step-*.part"))

        if not wait_for(half_written, process):
            process.wait()
            continue
        kill(process)
        hits += any(stage.glob(".step-*.part"))
        kept = sorted(stage.glob("step-*"))
        assert kept, "no checkpoint is left"
        assert all((path / "progress.json").is_file() for path in kept), kept
        finish(recipe_command(name, place, out, "--run.resume", "true"), place)
        assert weights(out) == weights(place / "whole")
        assert not list(out.rglob("*.part")), "leftovers stay after the resumed run"
        if hits == 2:
            break
    assert hits, "no kill fell into the writing of a checkpoint"
    return f"{hits} kills found a half-written checkpoint aside; the same weights"


@fault(
    "kill -9", "`patch --force` while it replaces a checkpoint", "the old checkpoint or the new one, whole", quick=False
)
def patch_killed_while_replacing(place: Path) -> str:
    import hf_linear_attn as hla
    from hf_linear_attn.training.saving import clear_leftovers

    save_encoder(place / "source", head=True)
    target = place / "target"
    command = ["-m", "hf_linear_attn", "patch", str(place / "source"), str(target), "--force", "--attention"]
    finish([*command, "elu"], place)
    seen = []
    for moment in ("begun", "written", "begun"):
        process = start([*command, "hedgehog"], place)

        def due(moment: str = moment) -> bool:
            parts = list(place.glob(".target.*.part"))
            return any(moment == "begun" or (part / "model.safetensors").exists() for part in parts)

        wait_for(due, process)
        if process.poll() is None:
            kill(process)
        clear_leftovers(place)
        loaded = hla.load_pretrained(str(target))
        seen.append(hla.patch_report(loaded).layers[0].attention)
    assert set(seen) <= {"elu", "hedgehog"}, seen
    return f"what was there after each kill: {', '.join(seen)}"


@fault("kill -9", "`plan`, at random moments", "taken up again, it ends with the same plan", quick=False)
def plan_killed(place: Path) -> str:
    save_decoder(place / "decoder")
    text = save_text(place / "text", 400)
    flags = ["--sequence-length", "32", "--steps", "4", "--quick", "--attention", "hedgehog", "--lengths", "64"]
    command = ["-m", "hf_linear_attn", "plan", str(place / "decoder"), "--budget", "50% perplexity", *flags]
    command += ["--text", str(text), "--out"]
    began = time.monotonic()
    process = start([*command, str(place / "whole")], place)
    assert process.wait(PATIENCE) in (0, 1), (place / "output.txt").read_text(encoding="utf-8")[-800:]
    length = time.monotonic() - began
    moments = random.Random("plan")
    for _ in range(3):
        process = start([*command, str(place / "out")], place)
        time.sleep(moments.uniform(0.5, 1.0) * length)
        if process.poll() is None:
            kill(process)
    assert start([*command, str(place / "out")], place).wait(PATIENCE) in (0, 1)
    plans = [(place / name / "plan.json").read_bytes() for name in ("whole", "out")]
    assert plans[0] == plans[1]
    return "the same plan.json, byte for byte"


# --------------------------------------------------------------------------------------------------------------------
# Two processes


def two_processes(place: Path, out: Path, *more: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    return [*launcher, *recipe_command("glue", place, out, *more)]


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the launcher's children."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text(encoding="utf-8").split()]


@fault(
    "kill -9", "one of two processes dies", "the other ends too, with a message; resumed, the same weights", quick=False
)
def a_worker_dies(place: Path) -> str:
    inputs(place)
    finish(two_processes(place, place / "whole"), place)
    out = place / "out"
    process = start(two_processes(place, out), place)
    stage = out / "checkpoints" / "distill"
    assert wait_for(lambda: any(stage.glob("step-*")), process), (place / "output.txt").read_text(encoding="utf-8")
    alive = workers(process)
    assert len(alive) == 2, alive
    began = time.monotonic()
    os.kill(alive[1], signal.SIGKILL)
    code = process.wait(PATIENCE)
    seconds = time.monotonic() - began
    output = (place / "output.txt").read_text(encoding="utf-8")
    assert code != 0
    assert "exitcode: -9" in output.replace(" ", "").replace("exitcode:-9", "exitcode: -9"), output[-800:]
    assert not any(Path(f"/proc/{number}").exists() for number in alive), "a worker is still there"
    finish(two_processes(place, out, "--run.resume", "true"), place)
    assert weights(out) == weights(place / "whole")
    return f"the other process was gone after {seconds:.0f} s, exit code {code}, `exitcode: -9` told; the same weights"
