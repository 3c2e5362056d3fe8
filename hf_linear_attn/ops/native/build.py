"""Compile the kernels for this machine, once, into a cache; load them with ctypes.

The sources travel with the package and need no header but the compiler's own: a build takes a few seconds. The library
is keyed by sources, compiler, flags and processor, so a home directory shared by different machines holds one for each.
If the build fails, its reason is logged once and other backends are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

#: Environment variable with the folder of compiled kernels, instead of the user's cache folder.
CACHE_VARIABLE = "HF_LINEAR_ATTN_CACHE"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
#: Flags for this machine's instructions; the first that the compiler knows is used.
MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
TIMEOUT = 300.0


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why and what would help."""


def cache_folder() -> Path:
    """Return `$HF_LINEAR_ATTN_CACHE`, else `hf_linear_attn` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_linear_attn"


def compiler() -> str:
    """Return the C++ compiler: `$CXX`, else the first of g++, clang++, c++ that is installed.

    Raises:
        BuildError: No compiler is installed.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler was found (g++, clang++ or $CXX)")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels, which are built if they are not in the cache.

    Raises:
        BuildError: There is no compiler, the build fails, or the library does not load.
    """
    if sys.platform == "win32":
        raise BuildError("the kernels are not built on Windows")
    path = _library_path()
    if not path.is_file():
        _compile(path)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load ({error}); remove it") from error
    loaded.hla_transpose.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.hla_transpose.restype = None
    return loaded


def _library_path() -> Path:
    folder = Path(__file__).parent
    sources = sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])
    parts = [part for path in sources for part in (path.name.encode(), path.read_bytes())]
    command = compiler()
    version = subprocess.run([command, "--version"], capture_output=True, timeout=60, check=False).stdout
    setting = repr((command, FLAGS, _openmp(), _processor())).encode()
    digest = hashlib.sha256(b"\0".join([*parts, version, setting])).hexdigest()[:16]
    return _private(cache_folder()) / f"kernels-{digest}.so"


def _private(folder: Path) -> Path:
    """Create the folder if needed and check that no one else may write there: its files are executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"the cache folder {folder} cannot be created ({error}); set {CACHE_VARIABLE}") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"the cache folder {folder} can be written by others; set {CACHE_VARIABLE} to one of your own")
    return folder


def _processor() -> str:
    """Return a text that differs between processors with different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))}))


def _openmp() -> tuple[str, ...]:
    """Return the compiler flags for threads: torch's own OpenMP runtime, so that the two share one pool of threads."""
    import torch  # noqa: F401  (loads its runtime)

    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:
        return ()
    loaded = sorted({name for name in mapped if "gomp" in Path(name).name and ".so" in name})
    return ("-fopenmp", loaded[0]) if loaded else ()


def _compile(path: Path) -> None:
    """Compile to a temporary file and rename it: another process sees the whole library or none."""
    logger.info("Compiling the native CPU kernels into %s (once, a few seconds).", path)
    source = Path(__file__).parent / "kernels.cpp"
    openmp = _openmp()
    errors = ""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        for machine in MACHINE_FLAGS:
            # -fopenmp compiles the pragmas; the runtime itself is named, so that no second one is linked.
            command = [compiler(), *FLAGS, *machine, *openmp[:1], str(source), "-o", str(output), *openmp[1:]]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{command[0]} did not run ({error})") from error
            if done.returncode == 0:
                os.replace(output, path)
                return
            errors = done.stderr.strip()
    raise BuildError(f"{compiler()} failed: {errors.splitlines()[0] if errors else 'no message'}")
