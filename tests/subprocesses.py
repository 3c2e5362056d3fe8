"""Python in other processes, in the root of the repository."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(root: Path = ROOT, **changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **changes}


def run_python(
    *arguments: object, root: Path = ROOT, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, such as `"-m", "pytest"`, and variables of the environment."""
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": root, "env": environment(root, **variables), "timeout": timeout}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(processes: int) -> list[str]:
    """Return arguments of Python that start processes (accelerate's launcher does so on CPUs through MPI only)."""
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
