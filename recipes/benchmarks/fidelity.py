"""Fidelity of every mechanism on real checkpoints: how near each is to softmax, before and after attention transfer.

    python -m recipes.benchmarks.fidelity
    python -m recipes.benchmarks.fidelity --model PATH --text PATH

Needs the `demo` extra. `--model` is a folder or a Hub name (default: the encoder of the demo), `--text` a file
(default: the docstrings of the standard library). Every mechanism that the registry holds for the model's direction
is measured with its default options: KL of the attention weights, relative error of the outputs, cosine of the final
hidden states, and the task's own measure (perplexity of a decoder, agreement of sentence embeddings of an encoder).
The result is `OUT/MODEL.json`; a finished mechanism is on disk at once and is not measured again by a second run with
the same settings. On two cores a mechanism takes one to three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_linear_attn.demo import DemoOptions, _load, make_plan, resolve_model
from hf_linear_attn.evaluation.judges import judges_for
from hf_linear_attn.evaluation.preparing import Data, prepare
from hf_linear_attn.evaluation.screen import Screen
from hf_linear_attn.evaluation.study import Study
from hf_linear_attn.evaluation.subject import Subject
from hf_linear_attn.evaluation.texts import read_text
from hf_linear_attn.registry import ATTENTIONS, list_attentions
from hf_linear_attn.utils.environment import environment, json_safe


def names_for(decoder: bool) -> list[str]:
    """The mechanisms of one direction, without softmax itself."""
    known = [name for name in list_attentions() if name != "softmax"]
    return [name for name in known if (ATTENTIONS.get(name).causal if decoder else ATTENTIONS.get(name).bidirectional)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(
        json.dumps({"format_version": 1, "rows": rows}, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    os.replace(aside, path)


def split_at(tokenizer: Any, pattern: str) -> None:
    """Give a tokenizer the splitting that its tokenizer.json has lost: every match of the pattern is one token."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Add the missing rows of a model to its file, and return all of them."""
    text = arguments.text
    options = DemoOptions(model=arguments.model, text=text, steps=arguments.steps, seed=arguments.seed)
    source, name = resolve_model(options.model)
    path = arguments.out / f"{Path(name).name}.json"
    rows = read_rows(path)
    loaded = _load(source, options)
    if arguments.split is not None:
        split_at(loaded.tokenizer, arguments.split)
    plan = replace(make_plan(options, loaded), attentions=())
    data: Data = prepare(read_text(text), loaded.tokenizer, plan)
    settings = {
        "steps": plan.steps,
        "seed": plan.seed,
        "sequence_length": plan.sequence_length,
        "batch_size": plan.batch_size,
        "split": arguments.split,
        "text": {**data.facts, "source": Path(text).name if text else data.facts["source"]},
    }
    done = {(row["model"], row["mechanism"]) for row in rows if row["settings"] == json_safe(settings)}
    wanted = arguments.attentions or names_for(loaded.decoder)
    with Screen(Console()) as screen:
        subject = Subject.of(loaded.model, "decoder" if loaded.decoder else "encoder", name)
        judges = judges_for(subject.kind, loaded.model, data, plan)
        study = Study(subject, data=data, plan=plan, judges=judges, progress=screen)
        exact, control = study.references()
        for mechanism in wanted:
            if (name, mechanism) in done:
                continue
            result = study.mechanism(mechanism)
            row = {
                "model": name,
                "kind": "decoder" if loaded.decoder else "encoder",
                "mechanism": mechanism,
                "settings": settings,
                "exact": exact,
                "without_attention": control,
                **{key: result[key] for key in ("options", "learned_parameters", "untrained", "transfer", "trained")},
                "environment": environment(loaded.model.device),
            }
            rows.append(json_safe(row))
            write_rows(path, rows)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("model", "mechanism", "KL", "output error", "final cosine", "perplexity / sentence cosine")

    def change(row: dict[str, Any], read: Any) -> str:
        values = [read(row[part]) for part in ("untrained", "trained") if row[part] is not None]
        return " → ".join("–" if value is None else f"{value:.3f}" for value in values)

    def task(part: dict[str, Any]) -> float:
        return part["perplexity"]["perplexity"] if "perplexity" in part else part["sentences"]["cosine"]

    for row in rows:
        measures = [change(row, lambda part, key=key: part[key]) for key in ("kl", "output_error", "final_cosine")]
        shown.add_row(row["model"], row["mechanism"], *measures, change(row, task))
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name (default: the encoder of the demo)")
    parser.add_argument("--text", help="text file (default: docstrings of the standard library)")
    parser.add_argument("--split", metavar="REGEX", help="what a token is, for a tokenizer that has lost its splitting")
    parser.add_argument("--attentions", nargs="+", help="mechanisms (default: all of the model's direction)")
    parser.add_argument("--steps", type=int, default=100, help="steps of attention transfer (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("recipes/results/fidelity"), help="folder of the results")
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    Console().print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
