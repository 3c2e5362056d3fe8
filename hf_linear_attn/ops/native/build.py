"""Load the CPU kernels with ctypes: from the wheel, or compiled for this machine, once, into a cache.

A wheel for Linux or macOS has a library for each instruction set in `INSTRUCTION_SETS`; the best that the processor has
is loaded. Without one, the sources, which travel with the package and need no header but the compiler's own, are
compiled in a few seconds. That library is keyed by sources, compiler, flags and processor, so a home directory shared
by different machines holds one for each. If the build fails, its reason is logged once and other backends are used.

The libraries leave the functions of OpenMP undefined: they use torch's own runtime, so that the two share one pool of
threads. `setup.py` runs this file by its path, without the package: it imports nothing but the standard library.
"""

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
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

#: Environment variable with the folder of compiled kernels, instead of the user's cache folder.
CACHE_VARIABLE = "HF_LINEAR_ATTN_CACHE"
#: Environment variable with the instruction set to use: a name in `INSTRUCTION_SETS`, or `native` to compile for this
#: processor even where the wheel has kernels.
INSTRUCTIONS_VARIABLE = "HF_LINEAR_ATTN_INSTRUCTIONS"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-w")
#: Flags for this machine's instructions; the first that the compiler knows is used.
MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
_V3 = "avx2 bmi1 bmi2 f16c fma movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
#: The instruction sets that a wheel for a machine has kernels for, the best first: the flags of the compiler, and those
#: of /proc/cpuinfo that the processor must have.
INSTRUCTION_SETS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "x86_64": {
        "amx": (
            ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            f"{_V4} avx512_bf16 amx_tile amx_bf16",
        ),
        "avx512": (("-march=x86-64-v4",), _V4),
        "avx2": (("-march=x86-64-v3",), _V3),
    },
    "aarch64": {"neon": ((), "")},
    "arm64": {"neon": ((), "")},  # as macOS calls it
}
TIMEOUT = 300.0


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why and what would help."""


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
    """Return the kernels, which are compiled if neither the wheel nor the cache has them.

    Raises:
        BuildError: There is no compiler, the build fails, the library does not load, or the processor lacks the
            instructions that `$HF_LINEAR_ATTN_INSTRUCTIONS` names.
        ValueError: `$HF_LINEAR_ATTN_INSTRUCTIONS` names no instruction set of this machine.
    """
    name, path = library_path()
    if not path.is_file():
        logger.info("Compiling the native CPU kernels into %s (once, a few seconds).", path)
        compile_kernels(path, MACHINE_FLAGS if name == "native" else [_instruction_sets()[name][0]], _openmp())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load ({error}); remove it") from error


def library_path() -> tuple[str, Path]:
    """Return the instruction set in use (`native`: this processor's own) and the library: the wheel's, or in the cache.

    Raises:
        BuildError: See `library`.
        ValueError: See `library`.
    """
    if sys.platform == "win32":
        raise BuildError("the kernels are not built on Windows")
    sets = _instruction_sets()
    flags = set(_processor().split())
    name = os.environ.get(INSTRUCTIONS_VARIABLE)
    if name not in (None, "native", *sets):
        choices = ", ".join([*sets, "native"])
        raise ValueError(f"{INSTRUCTIONS_VARIABLE} is {name!r}; on this machine it can be {choices}.")
    missing = set(sets[name][1].split()) - flags if name in sets else ()
    if missing:
        raise BuildError(f"the processor lacks {', '.join(sorted(missing))} for {INSTRUCTIONS_VARIABLE}={name}")
    if _runtime_has("__kmpc_fork_call" if sys.platform == "darwin" else "GOMP_parallel"):
        for candidate in [name] if name else sets:
            path = wheel_library(candidate)
            if path.is_file() and set(sets[candidate][1].split()) <= flags:
                return candidate, path
    return name or "native", _cached_library(name or "native")


def wheel_library(instructions: str) -> Path:
    """Return the path of the library for an instruction set that a wheel has and a checkout has not."""
    return Path(__file__).parent / f"kernels-{instructions}.so"


def _instruction_sets() -> dict[str, tuple[tuple[str, ...], str]]:
    return INSTRUCTION_SETS.get(platform.machine(), {})


def _cached_library(instructions: str) -> Path:
    folder = Path(__file__).parent
    sources = sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])
    settings = compiler(), _version(compiler()), instructions, FLAGS, _openmp(), _processor()
    contents = [(path.name, path.read_bytes()) for path in sources]
    digest = hashlib.sha256(repr((contents, settings)).encode()).hexdigest()[:16]
    return cache_folder() / f"kernels-{digest}.so"


def cache_folder() -> Path:
    """Return `$HF_LINEAR_ATTN_CACHE`, else `hf_linear_attn` in the user's cache folder, created if needed.

    No one else may write there: its files are executed.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path(base, "hf_linear_attn")).expanduser()
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


@functools.cache
def _version(command: str) -> str:
    return _run(command, "--version")


def _openmp() -> bool:
    """Return whether torch brought the OpenMP runtime that the code of this compiler calls; else one thread is used."""
    return _runtime_has("__kmpc_fork_call" if "clang" in _version(compiler()) else "GOMP_parallel")


def _runtime_has(function: str) -> bool:
    """Return whether libraries loaded from now on can call a function of OpenMP."""
    import torch

    for runtime in Path(torch.__file__).parent.glob("lib/libomp.dylib"):  # on macOS torch alone sees it at first
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    return hasattr(ctypes.CDLL(None), function)


def compile_kernels(path: Path, alternatives: Sequence[tuple[str, ...]], openmp: bool = True) -> None:
    """Compile to a temporary file and rename it: another process sees the whole library or none.

    Args:
        path: The library to make.
        alternatives: Flags for the instructions of the machine; the first that the compiler knows are used.
        openmp: Whether the kernels use threads. A process that loads the library must have an OpenMP runtime then.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    command = compiler()
    threads: tuple[str, ...] = ()
    if openmp:
        threads = ("-Xclang", "-fopenmp") if "clang" in _version(command) else ("-fopenmp",)
    undefined = ("-Wl,-undefined,dynamic_lookup",) if sys.platform == "darwin" else ()
    source = Path(__file__).parent / "kernels.cpp"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled = Path(folder) / "kernels.o"
        output = Path(folder) / path.name
        for machine in alternatives:
            try:
                _run(command, *FLAGS, *machine, *threads, "-c", str(source), "-o", str(compiled))
                # A step of its own: with -fopenmp it would link the compiler's OpenMP runtime beside that of torch.
                _run(command, "-shared", *undefined, str(compiled), "-o", str(output))
                break
            except BuildError:
                if machine == alternatives[-1]:
                    raise
        os.replace(output, path)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run ({error})") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {next(iter(done.stderr.strip().splitlines()), 'no message')}")
    return done.stdout
