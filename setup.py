"""Add compiled kernels to the wheel, one library for each instruction set; pyproject.toml has everything else.

`HF_LINEAR_ATTN_PURE=1` makes a pure Python wheel, whose kernels are compiled on first use. So do a machine without a
C++ compiler, Windows, and an editable installation.
"""

import os
import platform
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUILD = runpy.run_path("hf_linear_attn/ops/native/build.py")


def instruction_sets() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the instruction sets that this wheel gets kernels for; none make it a pure one."""
    if os.environ.get("HF_LINEAR_ATTN_PURE", "0") != "0" or sys.platform == "win32":
        return {}
    try:
        BUILD["compiler"]()
    except BUILD["BuildError"] as error:
        sys.stderr.write(f"A pure Python wheel: {error}.\n")
        return {}
    return BUILD["INSTRUCTION_SETS"].get(platform.machine(), {})


SETS = instruction_sets()


class KernelDistribution(Distribution):
    """A distribution for one platform if it has kernels."""

    def has_ext_modules(self) -> bool:
        return bool(SETS)


class BuildKernels(build_py):
    """Compile the kernels into the build folder."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "hf_linear_attn", "ops", "native")
        if not self.editable_mode:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda name: compile_kernels(folder, name), SETS))


def compile_kernels(folder: Path, name: str) -> None:
    """Compile the kernels for an instruction set, unless the compiler is too old to know it."""
    try:
        BUILD["compile_kernels"](folder / f"kernels-{name}.so", [SETS[name][0]])
    except BUILD["BuildError"] as error:
        sys.stderr.write(f"No kernels for {name} in this wheel: {error}\n")


class PlatformWheel(bdist_wheel):
    """A wheel with kernels serves every Python of its platform, since they are called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=KernelDistribution, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
