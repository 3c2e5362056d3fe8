"""Memory: what a call needs at its peak, and what can still be had."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
MEMORY = Path("/proc/meminfo")

#: The control group of a container (version 2), with its limit and use of memory.
GROUP = Path("/sys/fs/cgroup")


def peak_memory(function: Callable[[], object], device: torch.device, *, collect: bool = True) -> int | None:
    """Return the bytes that one call needs at its peak beyond what was allocated before it.

    They are those of the allocator on a GPU, and of the resident set of the process on a CPU (None where the system
    does not tell: it takes Linux).

    Freed memory is handed back to the system first. What is smaller than a few hundred kilobytes is noise.
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or not _reset_peak():
        return None
    with suppress(AttributeError):  # the C library would keep freed memory resident, and a second call need none
        ctypes.CDLL(None).malloc_trim(0)
    before = _proc_bytes(STATUS, "VmRSS")
    _reset_peak()
    function()
    return max(0, _proc_bytes(STATUS, "VmHWM") - before)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be had, or None where the system does not tell.

    On a GPU these are of its memory, what the allocator holds unused included; on a CPU what Linux calls available, or
    what is left of the control group's limit.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type != "cpu":
        return None
    sizes = _left_of_group(), _proc_bytes(MEMORY, "MemAvailable") or None
    return min((size for size in sizes if size is not None), default=None)


def _left_of_group() -> int | None:
    """Return the limit of a control group less what it uses, files that can be dropped aside; None without one."""
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit, used = (int((GROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        counts = dict(line.split() for line in (GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(counts.get("inactive_file", 0)))
    return None


def _reset_peak() -> bool:
    """Reset the highest resident set that the kernel remembers (proc(5)); return whether that is possible."""
    with suppress(OSError):
        CLEAR.write_text("5", encoding="ascii")
        return _proc_bytes(STATUS, "VmHWM") > 0
    return False


def _proc_bytes(path: Path, name: str) -> int:
    """Return the bytes of a line such as `VmRSS:  13884 kB` in a file of /proc; 0 where there is none."""
    with suppress(OSError):
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0
