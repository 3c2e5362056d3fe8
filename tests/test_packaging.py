"""What the package says of itself. (Wheel and sdist are built and checked by .ci/run.)"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, entry_points, metadata, requires
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import hf_linear_attn
from hf_linear_attn.version import __version__

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs the repository, and runs outside of it"
)


@pytest.fixture(scope="module")
def installed() -> None:
    try:
        distribution("hf-linear-attn")
    except PackageNotFoundError:
        pytest.skip("the package is imported from the folder; `pip install -e .` gives it metadata to check")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_one_version(project: dict[str, Any]) -> None:
    assert hf_linear_attn.__version__ == __version__
    assert project["project"]["dynamic"] == ["version"]
    holders = [
        path.name
        for path in (ROOT / "hf_linear_attn").rglob("*.py")
        if f'"{__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert holders == ["version.py"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("installed")
def test_metadata() -> None:
    assert (files("hf_linear_attn") / "py.typed").is_file()
    about = metadata("hf-linear-attn")
    assert about["Version"] == __version__
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"


@pytest.mark.usefixtures("installed")
def test_command() -> None:
    (command,) = [point for point in entry_points(group="console_scripts") if point.name == "hf-linear-attn"]
    assert command.value == "hf_linear_attn.cli:main"


@pytest.mark.usefixtures("installed")
def test_extras_build_on_each_other() -> None:
    listed = requires("hf-linear-attn") or []
    assert any(re.match(r"hf-linear-attn\[demo\].*extra == .test.", line) for line in listed)
    assert any(re.match(r"hf-linear-attn\[train\].*extra == .test.", line) for line in listed)
    assert any(re.match(r"hf-linear-attn\[test\].*extra == .dev.", line) for line in listed)


def test_every_direct_dependency_is_pinned(project: dict[str, Any]) -> None:
    about = project["project"]
    requirements = [
        *about["dependencies"],
        *(line for extra in about["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[\[<>=, ]", line)[0].lower() for line in requirements} - {"hf-linear-attn"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert names <= set(pins)
    assert next(iter(pins)) == "torch", "torch first: its pin decides which build the resolver takes"
    bounds = dict(re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups() for line in requirements if ">=" in line)
    for name, bound in bounds.items():
        assert _number(pins[name.lower()]) >= _number(bound), name


def test_every_import_is_declared(project: dict[str, Any]) -> None:
    """Anything that the package imports is a dependency, or an optional one imported inside a function."""
    declared = {re.split(r"[\[<>=, ]", line)[0] for line in project["project"]["dependencies"]}
    required = {"huggingface_hub", "numpy", "tokenizers", "yaml"}  # of transformers; `pyyaml` is what installs yaml
    required.add("hf_linear_attn")  # the verbs of the command line call the public functions
    known = declared | required | sys.stdlib_module_names
    for path in (ROOT / "hf_linear_attn").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported.append(node.module or "")
            # Modules that are imported when they are first used: kernels, and the server, which says what it lacks.
            lazy = {"triton.": {"triton"}, "serving.server": {"fastapi", "starlette", "uvicorn"}}
            module = f"{path.parent.name}.{path.stem}"
            allowed = set().union(*(names for start, names in lazy.items() if module.startswith(start)))
            assert {name.partition(".")[0] for name in imported} <= known | allowed, path.name


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
