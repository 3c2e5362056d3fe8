"""The way to add a mechanism, followed to the letter: the file of CONTRIBUTING.md, in a copy of the package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.subprocesses import ROOT, run_python

GUIDE = ROOT / ".github" / "CONTRIBUTING.md"
TEXT = GUIDE.read_text(encoding="utf-8") if GUIDE.is_file() else ""

pytestmark = pytest.mark.skipif(not TEXT, reason="needs the repository, and runs outside of it")


@pytest.mark.slow
def test_the_mechanism_of_the_guide_is_one_file(tmp_path: Path) -> None:
    for name in ("hf_linear_attn", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    match = re.search(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None
    (tmp_path / match[1]).write_text(match[2], encoding="utf-8")
    name = Path(match[1]).stem
    listed = run_python("-m", "hf_linear_attn", "list", name, root=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "log(1 + exp(x))" in listed.stdout
    tests = ["tests/mechanisms/test_contract.py", "tests/matrix/test_lifecycle.py", "tests/matrix/test_forward.py"]
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", name, root=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", run_summary(done.stdout))
    assert passed is not None
    assert int(passed[1]) > 40


def run_summary(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_what_the_guide_names_exists() -> None:
    for path in re.findall(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (recipes\.[\w.]+)", TEXT):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for path in re.findall(r"`((?:tests|hf_linear_attn|recipes)/[\w./]+\.py)`", TEXT):
        assert (ROOT / path).is_file(), path
