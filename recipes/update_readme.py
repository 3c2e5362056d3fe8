"""Rewrite the generated parts of README.md: the table of mechanisms, and the demo's results where there are any.

python recipes/update_readme.py            # needs nothing but the package; under a second
python recipes/update_readme.py --check    # writes nothing; exit code 1 where README.md is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from hf_linear_attn import list_attentions
from hf_linear_attn.cli import directions
from hf_linear_attn.evaluation.summary import summarise_report

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DEMO = ROOT / "recipes" / "results" / "demo-minilm"
PLOT = "speedup.png"
#: Sentences of the report to repeat: the best mechanism, and the model without attention for scale.
FINDINGS = 2


def mechanisms_table() -> str:
    """All built-in mechanisms as a Markdown table."""
    rows = [
        "| name | directions | learned | state | cost | paper | when to choose |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in list_attentions().items():
        cells = (
            f"`{name}`",
            directions(entry),
            "yes" if entry["learned"] else "no",
            entry["state"],
            entry["cost"],
            _linked(entry["paper"]),
            entry["advice"],
        )
        rows.append(_row(list(cells)))
    return "\n".join(rows)


def demo_results(folder: Path = DEMO) -> str | None:
    """Table, plot and findings of the committed report; None where there is none."""
    if not (folder / "report.json").is_file():
        return None
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    summary = summarise_report(report)
    hardware, versions = report["hardware"], report["versions"]
    where = f"{hardware['cpu']}, threads: {hardware['threads']}" if hardware["device"] == "cpu" else hardware["device"]
    quick = " --quick" if report["settings"]["quick"] else ""
    lines = [
        f"`hf-linear-attn demo{quick}` on {report['model']['name']} ({where}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; {report['seconds']:.0f} seconds). Quality on held-out text, before → after "
        "attention transfer; speed of the whole model by length in tokens:",
        "",
        _row([column.title for column in summary.columns]),
        _row(["---"] * len(summary.columns)),
        *(_row(cells) for cells in summary.rows),
        "",
        *(f"- {text}" for text in report["verdicts"][:FINDINGS]),
    ]
    if (folder / PLOT).is_file():
        picture = (folder / PLOT).relative_to(ROOT) if folder.is_relative_to(ROOT) else folder / PLOT
        lines += ["", f"![Speed of the whole model against exact attention, by length]({picture.as_posix()})"]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def replace_part(text: str, name: str, body: str) -> str:
    """The text between `<!-- name:begin -->` and `<!-- name:end -->` replaced by `body`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin} and {end} once each, in this order.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def updated(text: str) -> str:
    """README.md as it should be."""
    text = replace_part(text, "mechanisms", mechanisms_table())
    results = demo_results()
    return text if results is None else replace_part(text, "demo", results)


def _linked(paper: str) -> str:
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where README.md is stale")
    check = parser.parse_args().check
    before = README.read_text(encoding="utf-8")
    after = updated(before)
    if before == after:
        return 0
    if check:
        sys.stderr.write("README.md is out of date: run python recipes/update_readme.py\n")
        return 1
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
