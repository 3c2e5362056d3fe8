"""Tensor parallelism and context parallelism in two and four processes on a CPU: equal to one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = "tests.integration.parallel_worker"


def run(command: list[str], processes: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    errors = [folder / f"{rank}.txt" for rank in range(processes)]
    started = []
    for rank, path in enumerate(errors):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as stream:
            started.append(
                subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=stream, stderr=stream)
            )
    try:
        codes = [process.wait(timeout=1500) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in errors)


def test_slices_of_a_sequence_in_two_processes(tmp_path: Path) -> None:
    run(["-m", WORKER, "quick", str(tmp_path)], 2, tmp_path)


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(text.partition("```py\n# torchrun")[2].partition("\n")[2].partition("```")[0], encoding="utf-8")
    run([str(script)], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("task", ["context", "tensor"])
def test_each_split_equals_one_process(task: str, processes: int, tmp_path: Path) -> None:
    run(["-m", WORKER, task, str(tmp_path)], processes, tmp_path)
