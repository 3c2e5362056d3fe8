"""Write the generated tables of README.md, docs/ and recipes/results/README.md from the registry and recipes/results/.

    python -m recipes.benchmarks.write_tables            # some seconds
    python -m recipes.benchmarks.write_tables --check    # writes nothing; exit code 1 where a file is out of date

A table is written between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, wherever these marks are.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hf_linear_attn import list_attentions
from hf_linear_attn.cli import directions
from hf_linear_attn.study.layer_search import LayerSearchResult

from .. import sentence_encoder
from ..quality_assurance import compare_packages
from ..smollm2 import CONTROL, EXACT, VARIANTS, summary_table
from . import result_tables
from .compare import read_report
from .headline import forward_tables, headline, memory_part
from .result_tables import RESULTS, machine_with_load, markdown_table, read_json

ROOT = RESULTS.parents[1]
FILES = ("README.md", "recipes/README.md", "recipes/results/README.md", "docs/*.md")
MARK = re.compile(r"<!-- (?P<name>[\w-]+):begin -->\n.*?<!-- (?P=name):end -->", re.DOTALL)


def mechanisms_table() -> str:
    """All built-in mechanisms."""
    titles = ["name", "directions", "learned", "state", "cost", "paper", "when to choose"]
    rows = [
        [
            f"`{name}`",
            directions(entry),
            "yes" if entry["learned"] else "no",
            entry["state"],
            entry["cost"],
            re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", entry["paper"]),
            entry["recommendation"],
        ]
        for name, entry in list_attentions().items()
    ]
    return markdown_table(titles, rows, text_columns=None)


def report_summary(folder: Path) -> str:
    """The summary of a committed report of `evaluate` or of the demo, and its plot of quality against speed."""
    text = (folder / "report.md").read_text(encoding="utf-8").partition("\n## ")[0]
    picture = f"![Quality against speed]({_link(folder / 'quality_vs_speed.png')})"
    summary = text.removeprefix("# Linear attention in ").strip()
    return f"{summary}\n\n[The whole report]({_link(folder / 'report.md')}).\n\n{picture}"


def plan_table(folder: Path = RESULTS / "plan-stories260k") -> str:
    """Table, first finding and plot of the committed plan."""
    report = read_json(folder / "plan-report.json")
    result = LayerSearchResult.from_dict({**report["result"], "budget": report["settings"]["budget"]})
    table = result.formatted_table().reset_index()
    settings = report["settings"]
    flags = ["--search heads"] if settings.get("search") == "heads" else []
    flags += [f"--attention {result.attention}"]
    flags += [f"--options.{name} {value}" for name, value in settings["options"].items()]
    flags += [f"--steps {settings['steps']}", f"--data.max_length {settings['sequence_length']}"]
    return "\n".join(
        [
            f"{report['model']['name']} ({report['model']['parameters']:,} parameters), `{' '.join(flags)}`, "
            f"{machine_with_load(report)}; a star marks the plan:",
            "",
            markdown_table(list(table.columns), table.to_numpy().tolist(), text_columns=None),
            "",
            report["summary"][0],
            "",
            f"![Perplexity and costs by the number of {result.part} converted]({_link(folder / 'curve.png')})",
        ]
    )


#: The conversions of SmolLM2 that the short table shows.
SMOLLM2_ROWS = (EXACT, "mixture, untrained", "mixture, trained", "window, trained", "store, trained", CONTROL)


def smollm2_table(rows: Sequence[str] = ()) -> str:
    """The committed conversions of SmolLM2: a row for each variant (or some), what it is at 2,048 and 8,192 tokens."""
    measured: dict[str, Any] = {}
    folders = {
        "smollm2-probe": "probe only, untrained",
        "smollm2-short-probe-untrained": "short probe, untrained",
        "smollm2-untrained": "untrained",
        "smollm2-short-probe": "short probe, trained",
        "smollm2": "trained",
    }
    for folder, kind in folders.items():
        results = read_json(RESULTS / folder / "results.json")
        for name in (EXACT, *VARIANTS):
            label = name if name in (EXACT, CONTROL) else f"{name}, {kind}"
            measured |= {label: results[name]} if name in results else {}
    table = summary_table({name: one for name, one in measured.items() if not rows or name in rows})
    table = table[[name for name in table if name.endswith(("variant", "2,048", "8,192"))]]
    return markdown_table(list(table.columns), table.astype(str).to_numpy().tolist(), text_columns=None)


def sentence_encoder_tables() -> str:
    """How near the converted sentence encoder is to the exact one, and its search in long documents."""
    tables = sentence_encoder.tables(read_json(RESULTS / "sentence-encoder" / "results.json"))
    rows = [(list(table.columns), table.astype(str).to_numpy().tolist()) for table in tables]
    return "\n\n".join(markdown_table(titles, lines) for titles, lines in rows)


def architectures_summary() -> str:
    """The outcomes of the test over all model types, in two sentences."""
    results = read_json(RESULTS / "architectures.json")
    counts = results["counts"]["elu"]
    return (
        f"[A test]({_link(RESULTS / 'architectures.md')}) over every model type of Transformers "
        f"{results['environment']['versions']['transformers']} builds a tiny random model of each, patches it and "
        "checks it (gradients, padding, causality, decoding, saving, unpatching). Of "
        f"{sum(counts.values())} cases {counts['works']} work, {counts['refused']} are refused with an error that says "
        f"why, {counts['cannot be built tiny']} could not be built or fed there and say nothing, {counts['wrong']} are "
        "wrong."
    )


def _link(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def benchmark_part(make: Callable[[dict[str, Any]], str], name: str = "benchmark-cpu.json.gz") -> str:
    return make(read_report(RESULTS / name))


#: Name of the marks -> function that makes the table. Links are relative to the root of the repository.
TABLES: dict[str, Callable[[], str]] = {
    "architectures": architectures_summary,
    "benchmark": lambda: benchmark_part(headline),
    "benchmark-forward": lambda: benchmark_part(forward_tables),
    "compiled": result_tables.compiled_table,
    "conversion": result_tables.conversion_table,
    "demo": lambda: report_summary(RESULTS / "demo-minilm").partition("\n\n")[2],
    "evaluate": lambda: report_summary(RESULTS / "evaluate-minilm").partition("\n\n")[2],
    "fidelity": result_tables.fidelity_tables,
    "glue": result_tables.glue_table,
    "glue-exact-heads": lambda: result_tables.glue_table(RESULTS / "glue-exact-heads.json"),
    "length-tricks": result_tables.length_tricks_tables,
    "lm": result_tables.lm_tables,
    "long": result_tables.long_summary,
    "long-all": result_tables.long_tables,
    "mechanisms": mechanisms_table,
    "memory": lambda: benchmark_part(memory_part, "benchmark-memory.json"),
    "onnx": result_tables.onnx_table,
    "packages": lambda: compare_packages.table(read_json(RESULTS / "packages.json")),
    "packing": result_tables.packing_summary,
    "plan": plan_table,
    "plan-heads": lambda: plan_table(RESULTS / "plan-smollm2"),
    "quantization": result_tables.quantization_table,
    "profile": result_tables.profile_tables,
    "smollm2": lambda: smollm2_table(SMOLLM2_ROWS),
    "smollm2-controls": smollm2_table,
    "stream": result_tables.stream_table,
    "sentence-encoder": sentence_encoder_tables,
    "transfer-cost": result_tables.transfer_cost_table,
    "transfer-loss": result_tables.transfer_loss_table,
}


@cache
def table(name: str) -> str:
    """Return the table of a mark.

    Raises:
        ValueError: There is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"There is no table {name!r}. Tables: {', '.join(TABLES)}.")
    return TABLES[name]()


def updated(text: str, path: str) -> str:
    """Return a page with its tables as they should be.

    Args:
        text: The page.
        path: Its path relative to the root of the repository, which its links are made relative to.

    Raises:
        ValueError: A mark has no end, or names no table.
    """
    folder = os.path.dirname(path)

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        body = re.sub(
            r"\]\((recipes/[^)]+)\)", lambda link: f"]({os.path.relpath(link[1], folder or '.')})", table(name)
        )
        return f"<!-- {name}:begin -->\n{body}\n<!-- {name}:end -->"

    replaced, count = MARK.subn(replace, text)
    if count != text.count(":begin -->") or count != text.count(":end -->"):
        raise ValueError(f"{path}: each <!-- NAME:begin --> needs its <!-- NAME:end -->, in this order.")
    return replaced


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        before = path.read_text(encoding="utf-8")
        after = updated(before, _link(path))
        if before != after:
            stale.append(_link(path))
            if not check:
                path.write_text(after, encoding="utf-8")
    if check and stale:
        sys.stderr.write(f"Out of date: {', '.join(stale)}. Run python -m recipes.benchmarks.write_tables\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
