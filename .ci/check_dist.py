"""Check what is in a wheel and an sdist: `python .ci/check_dist.py DIST_FOLDER`.

A wheel for one platform must have kernels for all instruction sets of this machine.
"""

from __future__ import annotations

import platform
import runpy
import sys
import tarfile
import zipfile
from pathlib import Path


def package_files(root: Path) -> set[str]:
    """Return the files of the package that must be in the wheel."""
    files = [path for path in (root / "hf_linear_attn").rglob("*") if path.is_file()]
    suffixes = (".py", ".typed", ".h", ".cpp")
    shipped = [path for path in files if path.suffix in suffixes or path.parent.name == "templates"]
    return {path.relative_to(root).as_posix() for path in shipped if "__pycache__" not in path.parts}


def main(folder: str) -> int:
    root = Path(__file__).resolve().parent.parent
    (wheel,) = Path(folder).glob("*.whl")
    (sdist,) = Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    problems = [f"not in the wheel: {name}" for name in sorted(package_files(root) - names)]
    if not wheel.name.endswith("-any.whl"):
        native = "hf_linear_attn/ops/native"
        sets = runpy.run_path(str(root / native / "build.py"))["INSTRUCTION_SETS"][platform.machine()]
        libraries = {f"{native}/kernels-{instructions}.so" for instructions in sets}
        problems += [f"not in the wheel: {name}" for name in sorted(libraries - names)]
    problems += [
        f"stray file in the wheel: {name}"
        for name in sorted(names)
        if not name.startswith("hf_linear_attn/") and ".dist-info/" not in name
    ]
    expected = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"]
    expected += [path.relative_to(root).as_posix() for path in (root / "tests").rglob("*.py")]
    problems += [f"not in the sdist: {name}" for name in sorted({*expected, *package_files(root)} - sources)]
    counts = [f"{wheel.name}: {len(names)} files", f"{sdist.name}: {len(sources)} files"]
    sys.stdout.write("\n".join([*problems, *counts]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
