"""Rewrite the generated parts of README.md and recipes/README.md, from the registry and from recipes/results/.

python -m recipes.benchmarks.write_tables            # needs nothing but the package; under a second
python -m recipes.benchmarks.write_tables --check    # writes nothing; exit code 1 where a file is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_linear_attn import list_attentions
from hf_linear_attn.cli import directions
from hf_linear_attn.evaluation.layer_search import LayerSearchResult
from hf_linear_attn.evaluation.summary import change, summarise_report

from . import long_words
from .headline import forward_tables, headline, memory_part

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RECIPES = ROOT / "recipes" / "README.md"
RESULTS = ROOT / "recipes" / "results"
DEMO = RESULTS / "demo-minilm"
PLAN = RESULTS / "plan-stories260k"
BENCHMARK = RESULTS / "benchmark-cpu.json"
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
            entry["recommendation"],
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


def plan_results(folder: Path = PLAN) -> str:
    """Table, first finding and picture of the committed plan."""
    report = json.loads((folder / "plan-report.json").read_text(encoding="utf-8"))
    result = LayerSearchResult.from_dict(report["result"])
    titles, rows = result.formatted_table()
    settings, hardware = report["settings"], report["hardware"]
    flags = [f"--attention {result.attention}"]
    flags += [f"--options.{name} {value}" for name, value in settings["options"].items()]
    flags += [f"--steps {settings['steps']}", f"--data.max_length {settings['sequence_length']}"]
    picture = (folder / "curve.png").relative_to(ROOT).as_posix()
    lines = [
        f"{report['model']['name']} ({report['model']['parameters']:,} parameters), `{' '.join(flags)}`, "
        f"{hardware['cpu']}, threads: {hardware['threads']}, load at the start "
        f"{hardware['load_average_at_start']:.0f}; a star marks the plan:",
        "",
        _row(titles),
        _row(["---"] * len(titles)),
        *(_row(cells) for cells in rows),
        "",
        result.summary()[0],
        "",
        f"![Perplexity and speed by the number of layers converted]({picture})",
    ]
    return "\n".join(lines)


def evaluation_results(folder: Path = RESULTS) -> str | None:
    """Table, verdicts and picture of every committed evaluation (`evaluate-*`); None where there is none."""
    parts = [_evaluation(path) for path in sorted(folder.glob("evaluate-*/report.json"))]
    return "\n\n".join(parts) if parts else None


def _evaluation(path: Path) -> str:
    report = json.loads(path.read_text(encoding="utf-8"))
    summary, advice = summarise_report(report), report["advice"]
    hardware, versions = report["hardware"], report["versions"]
    where = f"{hardware['cpu']}, threads: {hardware['threads']}" if hardware["device"] == "cpu" else hardware["device"]
    page = path.with_name("report.html").relative_to(ROOT).as_posix()
    lines = [
        f"**{report['model']['name']}** at {advice['length']:,} tokens ({where}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; [the whole report]({page})):",
        "",
        _row([column.title for column in summary.columns]),
        _row(["---"] * len(summary.columns)),
        *(_row(list(cells)) for cells in summary.rows),
        "",
        *(f"- **{held['name']}**: {held['call']}: {held['words']}" for held in advice["verdicts"]),
    ]
    picture = path.with_name("pareto.png")
    if picture.is_file():
        lines += ["", f"![Quality against speed]({picture.relative_to(ROOT).as_posix()})"]
    return "\n".join(lines)


def benchmark_results(make: Callable[[dict[str, Any]], str], path: Path = BENCHMARK) -> str | None:
    """Tables of the committed benchmark; None where there is none."""
    return make(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def profile_tables(path: Path = RESULTS / "profile.json") -> str:
    """What the torch forms, the native kernels and a decoding step spend their time on."""
    held = json.loads(path.read_text(encoding="utf-8"))
    peaks = held["product_operations_per_second"]
    kinds = list(held["torch_forms"][0]["shares"])
    rates = " and ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    lines = [
        f"{_measured_on(held)}; {held['settings']['length']:,} tokens, 12 heads of 64. One large product of PyTorch: "
        f"{rates}.",
        "",
        _row(["torch form, float32", "features", "time over products alone", *kinds]),
        _row(["---", *["---:"] * (2 + len(kinds))]),
    ]
    for row in held["torch_forms"]:
        shares = [f"{100 * row['shares'][kind]:.0f} %" for kind in kinds]
        over = f"{row['seconds'] / row['products_seconds']:.1f}"
        lines.append(_row([f"`{row['mechanism']}`, {row['direction']}", str(row["features"]), over, *shares]))
    for dtype, peak in peaks.items():
        columns = [f"native kernel, {dtype}", "multiplications a token and head", "GFLOP/s of all products"]
        columns += ["of one large product", "times as fast as the torch form"]
        lines += ["", _row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
        for row in held["native_kernels"]:
            if row["dtype"] == dtype:
                rate, each = row["operations_per_second"], row["multiplications_a_token_and_head"]
                cells = [f"`{row['mechanism']}`, {row['direction']}", f"{each:,}", f"{rate / 1e9:,.0f}"]
                faster = f"{row['torch_seconds'] / row['seconds']:.1f}"
                lines.append(_row([*cells, f"{100 * rate / peak:.0f} %", faster]))
    parts = list(held["steps"][0]["parts"])
    columns = ["decoding step, µs", *parts, "the state's own update"]
    lines += ["", _row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
    for row in held["steps"]:
        times = [f"{1e6 * value:.1f}" for value in (*row["parts"].values(), row["floor"])]
        lines.append(_row([f"`{row['mechanism']}`, {row['features']} features", *times]))
    return "\n".join(lines)


def compiled_table(path: Path = RESULTS / "compiled-decoding.json") -> str:
    """The time of a token, eager and compiled, beside eager exact attention with its growing cache."""
    held = json.loads(path.read_text(encoding="utf-8"))
    contexts = held["settings"]["contexts"]
    rows = {(row["model"], row["attention"], row["compiled"], row["context"]): row["median"] for row in held["rows"]}
    lines = [
        f"{_measured_on(held)}; milliseconds a token, in brackets times as fast as eager exact attention.",
        "",
    ]
    columns = [f"{how} after {context:,} tokens" for context in contexts for how in ("eager", "compiled")]
    for model in dict.fromkeys(row["model"] for row in held["rows"]):
        lines += [_row([model, *columns]), _row(["---", *["---:"] * len(columns)])]
        for attention in dict.fromkeys(row["attention"] for row in held["rows"]):
            cells = []
            for context in contexts:
                before = rows[model, "sdpa", False, context]
                times = (rows[model, attention, compiled, context] for compiled in (False, True))
                cells += [f"{1e3 * seconds:.2f} ({before / seconds:.2f}×)" for seconds in times]
            lines.append(_row([f"`{attention}`", *cells]))
        lines.append("")
    return "\n".join(lines[:-1])


def _measured_on(held: dict[str, Any]) -> str:
    """Where one thread measured a recipe's results."""
    hardware, versions = held["environment"]["hardware"], held["environment"]["versions"]
    load = f"load at the start {hardware['load_average_at_start']:.1f}"
    return f"{hardware['cpu']}, one thread, torch {versions['torch']}, {load}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def replace_part(text: str, name: str, body: str) -> str:
    """The text between `<!-- name:begin -->` and `<!-- name:end -->` replaced by `body`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"The file must hold {begin} and {end} once each, in this order.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def architectures_summary(path: Path = RESULTS / "architectures.json") -> str:
    """What became of every model type, in a sentence."""
    held = json.loads(path.read_text(encoding="utf-8"))
    counts = held["counts"]["elu"]
    versions = held["environment"]["versions"]
    return (
        "[A test](recipes/results/architectures.md) over every model type of Transformers "
        f"{versions['transformers']} builds a tiny random model of each, patches it and checks it (gradients, padding, "
        f"causality, decoding, saving, unpatching). Of {sum(counts.values())} cases {counts['works']} work, "
        f"{counts['refused']} are refused with an error that says why, "
        f"{counts['cannot be built tiny']} could not be built or fed there and say nothing, "
        f"{counts['wrong']} are wrong."
    )


def fidelity_tables(folder: Path = RESULTS / "fidelity") -> str:
    """One table a checkpoint: every mechanism before and after attention transfer."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        parts.append(_fidelity_table(rows))
    return "\n\n".join(parts)


def _fidelity_table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    decoder, settings = first["kind"] == "decoder", first["settings"]
    text = settings["text"]
    exact = f"; perplexity of the exact model: {first['exact']['perplexity']['perplexity']:.2f}" if decoder else ""
    lines = [
        f"**{first['model']}** on {text['source']}: {text['fidelity_tokens']:,} held-out tokens in sequences of up to "
        f"{settings['sequence_length']}; transfer: {settings['steps']} steps of {settings['batch_size']} sequences, "
        f"seed {settings['seed']}{exact}.",
        "",
        _row(["mechanism", "KL, nats", "output error", "final cosine", "perplexity" if decoder else "sentence cosine"]),
        _row(["---"] * 5),
    ]

    def cells(row: dict[str, Any], read: Callable[[dict[str, Any]], float | None], digits: int) -> str:
        after = None if row["trained"] is None else read(row["trained"])
        return change(read(row["untrained"]), after, digits)

    def task(quality: dict[str, Any]) -> float:
        return quality["perplexity"]["perplexity"] if decoder else quality["sentences"]["cosine"]

    for row in sorted(rows, key=lambda row: row["mechanism"]):
        lines.append(
            _row(
                [
                    f"`{row['mechanism']}`",
                    cells(row, lambda quality: quality["kl"], 2),
                    cells(row, lambda quality: quality["output_error"], 2),
                    cells(row, lambda quality: quality["final_cosine"], 3),
                    cells(row, task, 2 if decoder else 3),
                ]
            )
        )
    return "\n".join(lines)


def glue_table(path: Path = RESULTS / "glue.json") -> str | None:
    """Mechanisms by tasks: the metric (mean over seeds), and the share of the control's that is recovered.

    A run shows the mechanism three times: as patched, after attention transfer (where it has something to learn), and
    at its end.
    """
    if not path.is_file():
        return None
    held = json.loads(path.read_text(encoding="utf-8"))
    rows = held["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    metrics = {row["task"]: row["metric"] for row in rows}
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        stages = {"patched": "untrained", "transferred": "after transfer", "distilled": row["variant"]}
        if row["mechanism"] == "softmax":
            stages = {"teacher": "as given", "distilled": row["variant"]}
        for stage, variant in stages.items():
            if stage in row:
                scores = found.setdefault((row["mechanism"], variant), {task: {} for task in tasks})
                scores[row["task"]][row["seed"]] = row[stage][row["metric"]]
    lines = [
        _row(["mechanism", "", *(f"{task}, {metrics[task]}" for task in tasks), "recovered"]),
        _row(["---", "---", *("---:" for _ in tasks), "---:"]),
    ]
    for (mechanism, variant), scores in found.items():
        # What has not been trained yet is held against the control at its end.
        trained = variant if any(row["variant"] == variant for row in rows) else "distilled"
        control = found.get(("softmax", trained), {})
        shares = [_recovered(scores[task], control.get(task, {})) for task in tasks]
        known = [share for share in shares if share is not None]
        recovered = f"{100 * statistics.mean(known):.1f} %" if known else "–"
        if known and len(known) < len(tasks):
            recovered += f" ({len(known)} of {len(tasks)})"
        cells = [_spread([*scores[task].values()]) for task in tasks]
        lines.append(_row([f"`{mechanism}`", variant, *cells, recovered]))
    return "\n".join(lines)


def _recovered(own: dict[int, float], control: dict[int, float]) -> float | None:
    """Mean score over that of the control of the same variant, over the seeds that both have."""
    seeds = sorted(own.keys() & control.keys())
    below = sum(control[seed] for seed in seeds)
    return sum(own[seed] for seed in seeds) / below if below else None


def lm_tables(folder: Path = RESULTS / "lm") -> str | None:
    """One table a decoder: perplexity of every variant after the same steps."""
    parts = [_lm_table(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join(parts) if parts else None


def _lm_table(held: dict[str, Any]) -> str:
    contexts = list(held["pretrained"])
    settings = held["rows"][0]["settings"]
    measured = held["pretrained"][contexts[0]]
    lines = [
        f"**{held['name']}**, trained on sequences of {settings['data']['max_length']} tokens; window of "
        f"{held['window']} tokens; perplexity over {measured['tokens']:,} held-out tokens, half a context apart:",
        "",
        _row(
            [
                "",
                "steps (transfer + tuning)",
                *(f"context {context}" for context in contexts),
                "to the tuned exact model",
            ]
        ),
        _row(["---", "---", *("---:" for _ in contexts), "---:"]),
        _row(["pretrained, exact", "0", *(f"{held['pretrained'][key]['perplexity']:.2f}" for key in contexts), ""]),
    ]
    variants = list(dict.fromkeys(row["variant"] for row in held["rows"]))
    means = {
        variant: [
            statistics.mean(row["perplexity"][key]["perplexity"] for row in held["rows"] if row["variant"] == variant)
            for key in contexts
        ]
        for variant in variants
    }
    for variant in variants:
        steps = next(row["steps"] for row in held["rows"] if row["variant"] == variant)
        ratio = f"{100 * (means[variant][0] / means['softmax'][0] - 1):+.1f} %" if "softmax" in means else "–"
        cells = [f"{value:.2f}" for value in means[variant]]
        lines.append(_row([variant, f"{steps['transfer']} + {steps['distill']}", *cells, ratio]))
    return "\n".join(lines)


def packing_results(path: Path = RESULTS / "packing.json") -> str:
    """What packing saves, in a sentence."""
    held = json.loads(path.read_text(encoding="utf-8"))
    settings, tokens, hardware = held["settings"], held["tokens"], held["environment"]["hardware"]
    words = {"both": "encoder", "causal": "decoder"}
    gains = [f"{row['speedup']:.2f}× `{row['attention']}` {words[row['direction']]}" for row in held["rows"]]
    return (
        f"`recipes/benchmarks/packing.py`, {settings['documents']} documents ({held['text']['source']}) in batches of "
        f"{settings['batch_size']}, cut to {settings['max_length']} tokens: {tokens['packed']:,} tokens, "
        f"{tokens['padded']:,} with padding ({tokens['padded'] / tokens['packed']:.2f}×). A forward and backward pass "
        f"of small models on the packed form is faster by {', '.join(gains)} ({hardware['cpu']}, threads: "
        f"{hardware['threads']}, load at the start {hardware['load_average_at_start']:.0f}; medians over batches, both "
        "forms in turn)."
    )


def _spread(scores: list[float]) -> str:
    if not scores:
        return "–"
    text = f"{100 * statistics.mean(scores):.1f}"
    return text if len(scores) == 1 else f"{text} ± {100 * statistics.stdev(scores):.1f}"


def updated(text: str) -> str:
    """README.md as it should be."""
    text = replace_part(text, "mechanisms", mechanisms_table())
    text = replace_part(text, "plan", plan_results())
    text = replace_part(text, "architectures", architectures_summary())
    text = replace_part(text, "packing", packing_results())
    text = replace_part(text, "stream", long_words.stream_results(RESULTS / "stream-book.json"))
    parts = {
        "demo": demo_results(),
        "evaluate": evaluation_results(),
        "benchmark": benchmark_results(headline),
        "long": long_words.headline(RESULTS / "long"),
    }
    for name, made in parts.items():
        text = text if made is None else replace_part(text, name, made)
    return text


def updated_recipes(text: str) -> str:
    """recipes/README.md as it should be."""
    text = replace_part(text, "fidelity", fidelity_tables())
    text = replace_part(text, "profile", profile_tables())
    text = replace_part(text, "compiled", compiled_table())
    parts = {"glue": glue_table(), "lm": lm_tables(), "benchmark": benchmark_results(forward_tables)}
    parts["long"] = long_words.tables(RESULTS / "long")
    parts["memory"] = benchmark_results(memory_part, RESULTS / "benchmark-memory.json")
    for name, made in parts.items():
        text = text if made is None else replace_part(text, name, made)
    return text


def _linked(paper: str) -> str:
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where README.md is stale")
    check = parser.parse_args().check
    stale = []
    for path, update in ((README, updated), (RECIPES, updated_recipes)):
        before = path.read_text(encoding="utf-8")
        after = update(before)
        if before == after:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if not check:
            path.write_text(after, encoding="utf-8")
    if check and stale:
        sys.stderr.write(f"Out of date: {', '.join(stale)}. Run python -m recipes.benchmarks.write_tables\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
