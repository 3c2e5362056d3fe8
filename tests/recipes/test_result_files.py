"""Result files hold the default options that made them, and pages cite none whose defaults are former ones."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import hf_linear_attn as hla
from hf_linear_attn.study.study import defaults_of
from tests.subprocesses import ROOT

RESULTS = ROOT / "recipes" / "results"
PAGES = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(((?:\.\./)?(?:recipes/results/)?[\w./-]+)\)")
#: The list of all tables may cite results of former defaults, if it says so.
ALL_TABLES, SAID = RESULTS / "README.md", "former defaults"

#: Results from before files held their defaults that other defaults would change: `hedgehog` outside of windows.
FORMER = {"proteins.json", "proteins-costs.json", "transfer-loss"}

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="needs the repository, and runs outside of it")


def defaults_in(path: Path) -> dict[str, Any] | None:
    """The defaults that a file of results holds, or that of a folder."""
    if path.is_dir():
        path = next((path / name for name in ("results.json", "evaluation.json") if (path / name).exists()), path)
    if not path.name.endswith((".json", ".json.gz")) or not path.exists():
        return None
    content = path.read_bytes()
    data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return data.get("defaults") if isinstance(data, dict) else None


def changed(recorded: dict[str, Any]) -> list[str]:
    """The mechanisms whose defaults are no longer those of a file."""
    return [name for name, options in recorded.items() if defaults_of([name]).get(name) != options]


def citations() -> list[tuple[Path, Path, str]]:
    """Each page, the result that it cites (a file, or the folder of a report), and the section around it."""
    cited = []
    for page in PAGES:
        for part in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            for target in LINK.findall(part):
                path = (page.parent / target).resolve()
                if RESULTS in path.parents and path.exists():
                    inner = path.relative_to(RESULTS)
                    cited.append((page, RESULTS / inner.parts[0], part))
    return cited


def test_results_hold_the_options_that_mechanisms_are_built_with() -> None:
    defaults = defaults_of({"rows": [{"attention": "hedgehog"}]})
    assert set(defaults) == {"hedgehog", "window"}
    assert defaults["window"]["encoder"]["feature_map"] == "vq"
    assert (defaults["window"]["encoder"]["sink_tokens"], defaults["window"]["decoder"]["sink_tokens"]) == (1, 4)
    assert set(defaults_of("nystrom")["nystrom"]) == {"encoder"}


def test_a_changed_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = defaults_of("nothing")
    assert not changed(recorded)
    monkeypatch.setattr("hf_linear_attn.mechanisms.window.BIDIRECTIONAL_SINKS", 2)
    assert changed(recorded) == ["window"]
    assert "window" in hla.list_attentions()


def test_pages_cite_results_of_the_present_defaults() -> None:
    cited = citations()
    assert len(cited) > 20
    wrong = set()
    for page, path, part in cited:
        recorded = defaults_in(path)
        former = path.name in FORMER if recorded is None else bool(changed(recorded))
        if former and not (page == ALL_TABLES and SAID in part):
            wrong.add((page.name, path.name))
    assert not wrong


def test_the_list_of_former_results_shrinks() -> None:
    for name in FORMER:
        assert (RESULTS / name).exists()
        assert defaults_in(RESULTS / name) is None
