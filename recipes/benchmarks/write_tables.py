"""Write the generated tables of README.md, docs/ and recipes/results/README.md from the registry and recipes/results/.

    python -m recipes.benchmarks.write_tables            # some seconds
    python -m recipes.benchmarks.write_tables --check    # writes nothing; exit code 1 where a file is out of date

A table is written between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, wherever these marks are.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import pandas as pd

from hf_linear_attn import list_attentions
from hf_linear_attn.cli.listing import directions
from hf_linear_attn.study.tables import to_markdown

from ..result_files import ROOT
from .tables import decoders, quality, speed
from .tables.text import CODE

FILES = ("README.md", "recipes/README.md", "recipes/results/README.md", "docs/*.md")
MARK = re.compile(r"<!-- (?P<name>[\w-]+):begin -->\n.*?<!-- (?P=name):end -->", re.DOTALL)


def mechanisms_table() -> str:
    """All built-in mechanisms."""
    link = partial(re.sub, r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)")
    rows = [
        {
            "name": CODE(name),
            "directions": directions(entry),
            "learned": "yes" if entry["learned"] else "no",
            "state": entry["state"],
            "cost": entry["cost"],
            "paper": link(entry["paper"]),
            "when to choose": entry["recommendation"],
        }
        for name, entry in list_attentions().items()
    ]
    return to_markdown(pd.DataFrame(rows), text_columns=None)


#: Rows and columns of the README's table of encoders.
ENCODER_LENGTHS = (256, 512, 2048)
ENCODER_COLUMNS = ("nothing", "hedgehog, calibrated", "128 codes, calibrated")

#: Variants and columns of the tables of rivals on the pages; the others are in the reports.
RIVALS = (
    "exact",
    "int8",
    "int4",
    "snapkv-50",
    "expected-attention-50",
    "duo-attention",
    "mixture",
    "mixture-int8",
    "window",
    "converted",
)
RIVALS_ROWS = ("exact", "int4", "mixture-int8")
RIVALS_COLUMNS = ("context", "variant", "cache", "loss", "niah", "time", "preparation")

#: Name of the marks -> function that makes the table. Links are relative to the root of the repository.
TABLES: dict[str, Callable[[], str]] = {
    "benchmark": speed.speed_table,
    "benchmark-forward": speed.attention_tables,
    "beyond-length": decoders.beyond_length_table,
    "budgets": decoders.budgets_table,
    "compiled": speed.compiled_table,
    "conversion": partial(quality.glue_table, stages=("distilled",)),
    "encoder-start": quality.encoder_start_table,
    "encoder-start-neighbors": partial(quality.encoder_start_table, metric="same_neighbor"),
    "encoder-start-short": partial(quality.encoder_start_table, ENCODER_LENGTHS, ENCODER_COLUMNS),
    "evaluate": quality.evaluation_summary,
    "fidelity": quality.fidelity_tables,
    "glue": quality.glue_table,
    "glue-exact-heads": partial(quality.glue_table, "glue-exact-heads.json"),
    "glue-start": partial(quality.glue_table, "glue-start.json"),
    "linear-part": decoders.linear_part_table,
    "long": quality.proteins_table,
    "mechanisms": mechanisms_table,
    "memory": speed.memory_tables,
    "rivals": partial(decoders.rivals_table, "rivals", RIVALS, RIVALS_COLUMNS),
    "rivals-short": partial(decoders.rivals_table, "rivals", RIVALS_ROWS, RIVALS_COLUMNS),
    "runtimes-encoder": partial(speed.runtimes_table, "runtimes.json", "s"),
    "runtimes-onnx": partial(speed.runtimes_table, "runtimes-onnx.json", "s"),
    "runtimes-onnx-prompt": partial(speed.runtimes_table, "runtimes-onnx-decoder.json", "s"),
    "runtimes-onnx-token": partial(speed.runtimes_table, "runtimes-onnx-decoder.json", "ms"),
    "runtimes-encoder-memory": partial(speed.runtimes_table, "runtimes.json", "MB"),
    "runtimes-prompt": partial(speed.runtimes_table, "runtimes-decoder.json", "s"),
    "runtimes-token": partial(speed.runtimes_table, "runtimes-decoder.json", "ms"),
    "short-inputs": speed.short_inputs_table,
    "short-inputs-codes": speed.codes_table,
    "terms-speed": speed.terms_table,
    "terms-quality": quality.terms_quality_table,
    "terms-decoders": partial(speed.terms_table, "models-terms-decoders.json"),
    "tokens": speed.tokens_table,
    "sentence-encoder": quality.sentence_encoder_tables,
    "serving": speed.serving_table,
    "smollm2": decoders.smollm2_table,
    "transfer-cost": speed.transfer_cost_tables,
    "transfer-loss": decoders.transfer_loss_table,
}


def table_of_run(results: dict[str, Any]) -> str:
    """Return all rows of a run, of timed values the medians."""
    rows = pd.json_normalize(results["rows"])
    columns = [name for name in rows if not name.endswith((".p20", ".p80", ".rounds"))]
    texts = rows[columns].map(lambda cell: f"{cell:.4g}" if isinstance(cell, float) else cell)
    return to_markdown(texts.rename(columns=lambda name: name.removesuffix(".median")), text_columns=None)


@cache
def table(name: str) -> str:
    """Return the table of a mark.

    Raises:
        ValueError: There is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"There is no table {name!r}. Tables: {', '.join(sorted(TABLES))}.")
    return TABLES[name]()


def updated(text: str, path: str) -> str:
    """Return a page with its tables as they should be.

    Args:
        text: The page.
        path: Its path relative to the root of the repository, which its links are made relative to.

    Raises:
        ValueError: A mark has no end, or names no table.
    """
    folder = os.path.dirname(path) or "."

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        body = re.sub(r"\]\((recipes/[^)]+)\)", lambda link: f"]({os.path.relpath(link[1], folder)})", table(name))
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
    for path in sorted(chain.from_iterable(map(ROOT.glob, FILES))):
        before = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        after = updated(before, name)
        if before != after:
            stale.append(name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if check and stale:
        sys.stderr.write(f"Out of date: {', '.join(stale)}. Run python -m recipes.benchmarks.write_tables\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
