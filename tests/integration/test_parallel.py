"""Tensor parallelism and context parallelism in two and four processes on a CPU: equal to one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow_cases import long
from tests.subprocesses import ROOT, environment, free_port

WORKER = "tests.integration.parallel_worker"


def run(command: list[str], processes: int, folder: Path) -> None:
    shared = environment(WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    errors = [folder / f"{rank}.txt" for rank in range(processes)]
    started = []
    for rank, path in enumerate(errors):
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=variables, stdout=stream, stderr=stream
            )
            started.append(process)
    try:
        codes = [process.wait(timeout=1500) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in errors)


@pytest.mark.slow
def test_slices_of_a_sequence_in_two_processes(tmp_path: Path) -> None:
    run(["-m", WORKER, "quick", str(tmp_path)], 2, tmp_path)


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(text.partition("```py\n# torchrun")[2].partition("\n")[2].partition("```")[0], encoding="utf-8")
    run([str(script)], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *long(4)])
@pytest.mark.parametrize("task", ["context", "tensor"])
def test_each_split_equals_one_process(task: str, processes: int, tmp_path: Path) -> None:
    run(["-m", WORKER, task, str(tmp_path)], processes, tmp_path)
