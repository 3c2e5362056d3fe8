"""Write the generated tables of README.md, docs/ and recipes/results/README.md from the registry and recipes/results/.

    python -m recipes.benchmarks.write_tables            # some seconds
    python -m recipes.benchmarks.write_tables --check    # writes nothing; exit code 1 where a file is out of date

A table is written between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, wherever these marks are. Every function here
makes one of them, with pandas.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from hf_linear_attn import list_attentions
from hf_linear_attn.cli.listing import directions
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.study.plan_result import PlanResult
from hf_linear_attn.utils.formatting import fixed, format_bytes, format_seconds
from hf_linear_attn.utils.timing import crossover

from .. import sentence_encoder, smollm2
from ..quality_assurance.marked_tests import packages_table
from ..tables import EMPTY, RESULTS, ROOT, read_json, to_markdown

FILES = ("README.md", "recipes/README.md", "recipes/results/README.md", "docs/*.md")
MARK = re.compile(r"<!-- (?P<name>[\w-]+):begin -->\n.*?<!-- (?P=name):end -->", re.DOTALL)

# --------------------------------------------------------------------------------------------------------------------
# Results and Markdown


@dataclass(frozen=True)
class Results:
    """A file of results: its settings, the machine, and a frame of its rows.

    Nested values have dotted columns, such as `seconds.median`.
    """

    settings: dict[str, Any]
    environment: dict[str, Any] | None
    rows: pd.DataFrame

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """Read a file of recipes/results, or any path; `.gz` is decompressed."""
        data = read_json(path)
        return cls(data.get("settings", {}), data.get("environment"), pd.json_normalize(data["rows"]))

    @property
    def machine(self) -> str:
        """Processor, threads, torch version, and the load average at the start, where it is known."""
        assert self.environment is not None
        hardware, versions = self.environment["hardware"], self.environment["versions"]
        name = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
        load = hardware["load_average_at_start"]
        load_text = "" if load is None else f", load at the start {load:.1f}"
        return f"{name}, threads: {hardware['threads']}, torch {versions['torch']}{load_text}"


def grid(
    rows: pd.DataFrame, columns: str, text: Callable[[pd.Series], str], name: str = "attention", unit: str = ""
) -> pd.DataFrame:
    """Return a table with the names of the rows down and a numeric column across, in the order of the rows."""
    cells = rows.assign(cell=rows.apply(text, axis=1)).pivot(index=name, columns=columns, values="cell")
    cells = cells.loc[rows[name].unique()]
    cells.columns = pd.Index([f"{column:,}{unit}" for column in cells.columns])
    return cells.rename_axis(index="").reset_index()


def times(value: float) -> str:
    """`0.043`, `0.43`, `4.3`, `43`, `4,300`: two significant digits."""
    if value >= 99.5:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.{3 if value < 0.0995 else 2 if value < 0.995 else 1 if value < 9.95 else 0}f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def mean(values: Sequence[float] | pd.Series, digits: int, scale: float = 1.0) -> str:
    """Return the mean, and behind it the standard deviation of several values (several seeds)."""
    series = scale * pd.Series(values, dtype=float).dropna()
    text = fixed(float(series.mean()), digits)
    return EMPTY if series.empty else text if len(series) == 1 else f"{text} ± {fixed(float(series.std()), digits)}"


# --------------------------------------------------------------------------------------------------------------------
# Attention by itself, decoding, whole models, memory

SDPA, FREE = "sdpa", "without attention"


def _with_backend(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with names such as `elu [native]`."""
    names = rows["attention"].where(rows["backend"] == "", rows["attention"] + " [" + rows["backend"] + "]")
    return rows.assign(attention=names)


def attention_tables(results: Results) -> str:
    """Speedup over `sdpa` with the crossover, and the time over that of the matrix products alone; forward, float32."""
    rows, parts = _with_backend(_forward(results.rows)), [f"{results.machine}."]
    for direction, group in rows.groupby("direction", sort=False):
        speedups = grid(group, "length", _speedup_or_seconds)
        ends = group.groupby("attention").apply(_crossover, include_groups=False)
        speedups["crossover"] = speedups[""].map(ends)
        limited = group[group["over_limit.median"].notna()]
        over = grid(limited, "length", _over_limit)
        parts += [f"**Speedup over sdpa: {direction}, float32, forward**", to_markdown(speedups)]
        parts += [f"**Time over limit: {direction}, float32, forward**", to_markdown(over)]
    notes = (
        "The row sdpa shows times. Crossover: from this length on faster than sdpa. Limit: PyTorch's own matrix "
        "products alone for the same shapes (causal: chunks of 128 tokens); *: operations counted, at the rate of a "
        "product of the heads in the same run."
    )
    return "\n\n".join([*parts, notes])


def _forward(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["dtype"] == "float32") & (rows["pass"] == "forward")]


def _over_limit(row: pd.Series) -> str:
    return times(row["over_limit.median"]) + "*" * (row["limit"] == "operations")


def _speedup_or_seconds(row: pd.Series) -> str:
    return format_seconds(row["seconds.median"]) if row["attention"] == SDPA else times(row["speedup.median"])


def _crossover(rows: pd.DataFrame) -> str:
    if (rows["speedup.median"] == 1).all():
        return ""
    result = crossover(rows["length"].tolist(), rows["speedup.median"].tolist())
    return f"{result.length:,.0f}" if result.relation == "=" else str(result)


def memory_tables(results: Results) -> str:
    """Peak memory of attention by itself, and its ratio to the output's bytes."""
    parts = [f"{results.machine}."]
    for (direction, done), group in _with_backend(results.rows).groupby(["direction", "pass"], sort=False):
        cells = grid(group, "length", lambda row: f"{format_bytes(row['bytes'])} ({times(row['to_output'])})")
        parts += [f"**Peak extra memory: {direction}, {done.replace('+', ' + ')}, float32**", to_markdown(cells)]
    note = (
        "Beyond what was in use before the call, the output included; in brackets: over the bytes of the output. What "
        "is smaller than a few hundred kilobytes is noise."
    )
    return "\n\n".join([*parts, note])


def headline(lengths: Sequence[int] = (4096, 16384)) -> str:
    """Speedup over `sdpa` by length, time over limit, one decoding step; then whole models, in words.

    Each mechanism on its fastest backend.
    """
    results, steps = Results.read("attention.json.gz"), Results.read("decoding.json.gz").rows
    rows = _forward(results.rows)
    by_name = rows[rows["attention"] != SDPA].groupby(["attention", "direction", "length"], sort=False)
    speedups, limits = by_name["speedup.median"].max(), by_name["over_limit.median"].min()
    columns: dict[str, pd.Series] = {}
    for direction in ("bidirectional", "causal"):
        for length in lengths:
            cells = speedups.xs((direction, length), level=(1, 2))
            columns[f"{direction}, {length:,} tokens"] = cells.map(lambda value: f"{times(value)}×")
        columns[f"{direction}, over limit"] = limits.xs((direction, lengths[-1]), level=(1, 2)).map(times)
    context = steps["context"].max()
    last = steps[(steps["dtype"] == "float32") & (steps["batch"] == 1) & (steps["context"] == context)]
    fastest = last[last["attention"] != SDPA].groupby("attention")["speedup.median"].max()
    columns[f"decoding step after {context:,}"] = fastest.map(lambda value: f"{times(value)}×")
    table = pd.DataFrame(columns).reindex(by_name.ngroup().index.map(rows["attention"]).unique())
    table.index = [f"`{name}`" if name in ATTENTIONS else name for name in table.index]
    parts = [
        f"{results.machine}.",
        "**Times as fast as sdpa, float32, forward (12 heads of 64)**",
        to_markdown(table.rename_axis(index="").reset_index()),
        f"Each mechanism on its fastest backend. Over limit: time at {lengths[-1]:,} tokens over that of PyTorch's own "
        "matrix products alone, or of as many operations. A step is compared with the growing key-value cache.",
        _whole_models(Results.read("models.json").rows),
    ]
    return "\n\n".join(parts)


def _whole_models(rows: pd.DataFrame) -> str:
    """A line for each model and dtype: speedups at its longest input beside that without attention."""
    lines = []
    for (model, dtype), group in rows[rows["pass"] == "forward"].groupby(["model", "dtype"], sort=False):
        longest = group["length"].max()
        speedups = group[group["length"] == longest].set_index("attention")["speedup.median"]
        texts = [f"`{name}` {speedup:.2f}×" for name, speedup in speedups.drop([SDPA, FREE]).items()]
        kind = "" if dtype == "float32" else f", {dtype}"
        lines.append(f"- {model} at {longest:,} tokens{kind}: {', '.join(texts)}; {FREE}: {speedups[FREE]:.2f}×.")
    return "\n".join(lines)


def compiled_table(results: Results) -> str:
    """Eager and compiled time of a forward pass and of a token, exact and linear."""
    length, rows = results.settings["length"], results.rows.copy()
    titles = {"forward": f"forward pass of {length:,} tokens", "token": f"a token after {length:,}"}
    for name in ("eager", "compiled"):
        rows[f"{name}, ms"] = (1e3 * rows[f"{name}.median"]).map("{:.1f}".format)
    rows["eager / compiled"] = rows["speedup.median"].map("{:.2f}×".format)
    rows["attention"] = "`" + rows["attention"] + "`"
    keys, values = ["model", "dtype", "attention"], ["eager, ms", "compiled, ms", "eager / compiled"]
    table = rows.pivot(index=keys, columns="work", values=values).loc[[*rows[keys].drop_duplicates().itertuples(False)]]
    table = table[[(value, work) for work in titles for value in values]]
    table.columns = pd.Index([f"{titles[work]}, {value}" for value, work in table.columns])
    return f"{results.machine}; medians.\n\n{to_markdown(table.reset_index().fillna(''), text_columns=3)}"


def transfer_cost_table(results: Results) -> str:
    """What a step of attention transfer costs in forward passes, by mechanism and length."""
    parts = [f"{results.machine}."]
    for model, rows in results.rows.groupby("model", sort=False):
        rows = rows.assign(attention=[f"`{name}`" for name in rows["attention"]])
        table = grid(rows, "length", lambda row: f"{row['forward_passes.median']:.2f}", unit=" tokens")
        parts.append(to_markdown(table.rename(columns={"": model})))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# Deployment: ONNX Runtime, int8 weights, streams


def onnx_table(results: Results) -> str:
    """Processor time and peak memory of an encoder under ONNX Runtime, by length."""
    names = {name: name if name == "exact" else f"`{name}`" for name in results.rows["attention"].unique()}
    cells = results.rows.pivot(index="length", columns="attention")
    columns = {f"{label}, s": cells["seconds"][name].map("{:.2f}".format) for name, label in names.items()}
    columns |= {f"{label}, MB": cells["megabytes"][name].map("{:,.0f}".format) for name, label in names.items()}
    table = pd.DataFrame({"tokens": [f"{length:,}" for length in cells.index]}, cells.index).assign(**columns)
    return f"{results.machine}.\n\n{to_markdown(table)}"


def quantization_table(results: Results) -> str:
    """Size, quality and time of models with int8 weights, beside the same attention in float32."""
    timed = [name for name in results.rows if name.startswith("seconds.") and name.endswith(".median")]
    parts = [f"{results.machine}."]
    if timed:
        parts += ["Processor time of one thread (medians), in brackets times as fast as the same attention in float32."]
    for model, rows in results.rows.groupby("model", sort=False):
        table = pd.DataFrame(
            {
                model: "`" + rows["attention"] + "`, " + rows["scheme"],
                "MB": rows["megabytes"].map("{:.0f}".format),
                rows["metric"].iloc[0]: rows["quality"].map("{:.2f}".format),
            }
        )
        for name in timed:
            if rows[name].notna().any():
                exact = rows[rows["scheme"] == "float32"].set_index("attention")[name]
                ratios = rows["attention"].map(exact) / rows[name]
                texts = [f"{1e3 * one:.0f} ms ({ratio:.2f}×)" for one, ratio in zip(rows[name], ratios, strict=True)]
                table[name.removeprefix("seconds.").removesuffix(".median")] = texts
        parts.append(to_markdown(table))
    return "\n\n".join(parts)


def stream_table(results: Results) -> str:
    """Losses by position, and the memory of the longest run and of the one token by token."""
    rows = results.rows
    compared = rows[rows["tokens"].notna() & (rows["chunk_length"] > 1)]
    first = compared.iloc[0]
    titles = [f"loss, {part['from']:,} to {min(part['to'], int(first['tokens'])):,}" for part in first["ranges"]]
    table = pd.DataFrame([[f"{part['loss']:.2f}" for part in row] for row in compared["ranges"]], columns=titles)
    table.insert(0, "attention", ["exact" if name == "softmax" else f"`{name}`" for name in compared["attention"]])
    table.insert(1, "positions", compared["positions"].tolist())
    table["bytes of the states"] = [f"{max(line['state_bytes'] for line in lines):,}" for lines in compared["lines"]]
    losses = compared.pivot(index="attention", columns="positions", values="loss")
    gaps = (losses["wrap"] - losses["restart"]).dropna()
    longest, single = rows.loc[rows["read"].idxmax()], rows[rows["chunk_length"] == 1].iloc[0]
    return "\n\n".join(
        [
            f"{first['model']} reads {first['text']}, mechanisms after {first['steps']} steps of attention transfer on "
            f"{first['train_text']}. Loss per token, in nats, by position in the stream (each a different part of the "
            "text: compare within a column).",
            to_markdown(table, text_columns=2),
            "What keeping the state costs against dropping it, in nats per token: "
            f"{', '.join(f'{gap:+.2f} with `{name}`' for name, gap in gaps.items())}.",
            f"- {_stream_memory(longest)}\n- {_stream_memory(single)}",
        ]
    )


def _stream_memory(row: pd.Series) -> str:
    lines = row["lines"]
    resident = [line["resident_bytes"] / 2**20 for line in (lines[0], lines[-1])]
    size = "token by token" if row["chunk_length"] == 1 else f"in pieces of {row['chunk_length']}"
    return (
        f"{'The whole book' if pd.isna(row['tokens']) else 'A part of it'}, `{row['attention']}`, `{row['positions']}`"
        f", {row['read']:,} tokens {size}: states of {lines[-1]['state_bytes']:,} bytes throughout; resident memory "
        f"{resident[0]:.0f} MiB after {lines[0]['tokens']:,} tokens, {resident[1] - resident[0]:+.1f} MiB at the end."
    )


# --------------------------------------------------------------------------------------------------------------------
# Conversions

#: Stages of a conversion on GLUE, and what the table calls them; the last one has the name of the row's variant.
STAGES = {"teacher": "as given", "patched": "untrained", "transferred": "after transfer", "distilled": None}


def glue_scores(path: str = "glue.json") -> pd.DataFrame:
    """Return tidy scores: a row for each mechanism, stage, task and seed, with the main metric of the task."""
    tidy = []
    for row in read_json(path)["rows"]:
        for stage, title in STAGES.items():
            if stage in row and (stage != "teacher" or row["mechanism"] == "softmax"):
                facts = {name: row[name] for name in ("mechanism", "task", "seed", "metric", "variant")}
                tidy.append({**facts, "stage": title or row["variant"], "score": row[stage][row["metric"]]})
    frame = pd.DataFrame(tidy).drop_duplicates(["mechanism", "stage", "task", "seed"], keep="last")
    stages = dict.fromkeys([*filter(None, STAGES.values()), *frame["stage"]])
    order = {name: list(names).index for name, names in (("mechanism", frame["mechanism"].unique()), ("stage", stages))}
    return frame.sort_values(list(order), key=lambda column: column.map(order[str(column.name)]), kind="stable")


def recovered(scores: pd.DataFrame, control: pd.DataFrame) -> str:
    """Return the mean over tasks of the score over the control's, of the seeds that both have."""
    both = scores.merge(control, on=["task", "seed"], suffixes=("", "_control"))
    means = both.groupby("task")[["score", "score_control"]].mean()
    return EMPTY if means.empty else f"{100 * (means['score'] / means['score_control']).mean():.1f} %"


def _control_of(scores: pd.DataFrame, stage: str) -> pd.DataFrame:
    """Stages before the last training are compared with the control after its distillation."""
    control = scores[scores["mechanism"] == "softmax"]
    return control[control["stage"] == (stage if stage in set(scores["variant"]) else "distilled")]


def glue_table(path: str = "glue.json") -> str:
    """Mechanisms by tasks: the metric (mean over seeds), and the share of the control's that is recovered."""
    scores, lines = glue_scores(path), []
    tasks = scores[["task", "metric"]].drop_duplicates()
    for (mechanism, stage), group in scores.groupby(["mechanism", "stage"], sort=False):
        line = {"mechanism": f"`{mechanism}`", "": stage}
        for task, metric in tasks.itertuples(index=False):
            line[f"{task}, {metric}"] = mean(group[group["task"] == task]["score"], 1, 100)
        lines.append({**line, "recovered": recovered(group, _control_of(scores, stage))})
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def conversion_table() -> str:
    """The distilled score of some tasks, and the share recovered after transfer and after distillation."""
    scores, lines = glue_scores(), []
    control = _control_of(scores, "distilled")
    for mechanism, group in scores.groupby("mechanism", sort=False):
        learned = mechanism != "softmax" and ATTENTIONS.get(mechanism.partition(" of ")[0]).learned
        stages = dict(list(group.groupby("stage")))
        line = {"mechanism": f"`{mechanism}`" + " (control)" * (mechanism == "softmax")}
        line["learned"] = "yes" if learned else "no"
        distilled = stages["distilled"]
        line |= {task: mean(distilled[distilled["task"] == task]["score"], 1, 100) for task in ("stsb", "mrpc", "sst2")}
        transferred = stages.get("after transfer", distilled[:0])
        line["recovered after transfer"] = recovered(transferred, control)
        lines.append({**line, "recovered after distillation": recovered(distilled, control)})
    titles = {"stsb": "STS-B, Pearson", "mrpc": "MRPC, accuracy", "sst2": "SST-2, accuracy"}
    return to_markdown(pd.DataFrame(lines).rename(columns=titles), text_columns=2)


def transfer_loss_table(folder: Path = RESULTS / "transfer-loss") -> str:
    """The perplexity of a converted decoder before and after attention transfer, by the loss of the transfer."""
    titles = {"teacher": "exact", "patched": "untrained", "transferred": "after attention transfer"}
    lines = []
    for path in sorted(folder.glob("*.json")):
        stages = read_json(path)["stages"]
        cells = {title: f"{stages[stage]['perplexity']:.2f}" for stage, title in titles.items()}
        lines.append({"loss": f"`--transfer.loss {path.stem}`", **cells})
    return to_markdown(pd.DataFrame(lines))


def fidelity_tables(results: Results) -> str:
    """One table for each checkpoint: every mechanism before and after attention transfer."""
    digits = {"kl": 2, "output_error": 2, "final_cosine": 3, "perplexity": 2, "sentence_cosine": 3}
    titles = {"kl": "KL, nats", "output_error": "output error", "final_cosine": "final cosine"}
    parts = []
    for model, rows in results.rows.groupby("model", sort=False):
        facts, lines = results.settings["models"][model], []
        metrics = [name for name in digits if name in rows and rows[name].notna().any()]
        for attention, group in rows.groupby("attention", sort=False):
            texts = {name: [fixed(one, digits[name]) for one in group[name].dropna()] for name in metrics}
            cells = {titles.get(name, name.replace("_", " ")): "→".join(texts[name]) or EMPTY for name in metrics}
            lines.append({"mechanism": f"`{attention}`", **cells})
        perplexity = facts.get("exact_perplexity")
        exact = f"; perplexity of the exact model: {perplexity:.2f}" if perplexity else ""
        parts.append(
            f"**{model}** on {facts['text']}: {facts['tokens']:,} held-out tokens in sequences of up to "
            f"{facts['sequence_length']}; transfer: {facts['steps']} steps of {facts['batch_size']} sequences, seed "
            f"{facts['seed']}{exact}."
        )
        parts.append(to_markdown(pd.DataFrame(lines), text_columns=None))
    return "\n\n".join(parts)


def linear_part_table(results: Results) -> str:
    """The losses of windows by what is outside of them, a column for each text; worth in brackets."""
    lines = []
    losses = results.rows.set_index(["model", "window", "outside", "text"])["loss"]
    for (model, window, outside), group in results.rows.groupby(
        ["model", "window", "outside"], sort=False, dropna=False
    ):
        cells = {}
        for text, loss in zip(group["text"], group["loss"], strict=True):
            without = losses.get((model, window, "nothing", text))
            worth = f" ({without - loss:+.3f})" if without is not None and outside != "nothing" else ""
            cells[text.partition(".")[0].replace("wiki", "WikiText-2")] = f"{loss:.3f}{worth}"
        width = EMPTY if pd.isna(window) else f"{window:.0f}"
        lines.append({"model": model.partition(".")[0], "window": width, "outside": outside, **cells})
    return to_markdown(pd.DataFrame(lines), text_columns=3)


# --------------------------------------------------------------------------------------------------------------------
# Long inputs


def _variants(rows: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """Rows that differ in their seed only, with variant and length as text; exact attention first."""
    order = sorted(rows["variant"].unique(), key=lambda name: (name != "softmax", "softmax" not in name))
    ordered = rows.assign(rank=rows["variant"].map(order.index)).sort_values(["rank", "pieces", "length"])
    groups = ordered.groupby(["variant", "length", "pieces"], sort=False)
    return [((f"`{key[0]}`", f"{'in pieces of ' * key[2]}{key[1]:,}"), group) for key, group in groups]


def _score(group: pd.DataFrame, stratum: str, metric: str) -> str:
    """Mean and deviation over seeds; of one seed, the bootstrap error of the Matthews correlation."""
    values, error = group[f"strata.{stratum}.{metric}"], f"strata.{stratum}.{metric}_error"
    if len(values) > 1 or error not in group:
        return mean(values, 3)
    return f"{values.iloc[0]:.3f} ± {group[error].iloc[0]:.3f}"


def _strata(rows: pd.DataFrame) -> dict[str, int]:
    names = [name.split(".")[1] for name in rows if name.startswith("strata.") and name.endswith(".rows")]
    return {name: int(rows[f"strata.{name}.rows"].iloc[0]) for name in names}


def proteins_summary(strata: Sequence[str] = ("> 1,024", "> 2,048")) -> str:
    """Quality beside costs, one row for each variant and length."""
    rows, costs = Results.read("proteins.json").rows, Results.read("proteins-costs.json").rows
    known, counts, lines = costs.set_index(["variant", "length"]), _strata(rows), []
    for (variant, length), group in _variants(rows):
        line = {"attention": variant, "residues seen": length}
        line |= {f"MCC, {name} ({counts[name]:,})": _score(group, name, "mcc") for name in strata}
        key = (group["variant"].iloc[0], float(group["length"].iloc[0]))
        if key in known.index and not group["pieces"].iloc[0]:
            cost = known.loc[key]
            line |= {f"{kind}, s": f"{cost[f'{kind}.seconds_per_1000']:.0f}" for kind in ("training", "inference")}
            line["memory added"] = f"{cost['peak_bytes'] / 1e6:.0f} MB"
        lines.append(line)
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def length_tricks_tables(folder: Path = RESULTS / "length-tricks") -> str:
    """Loss by position and pass keys of each variant, a table for each model: means over seeds."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        results, lines = Results.read(path), []
        spans = [name for name in results.rows if name.startswith("loss_by_position.")]
        keys = [name for name in results.rows if name.startswith("pass_key.") and results.rows[name].any()]
        for variant, group in results.rows.groupby("variant", sort=False):
            line = {results.settings["model"]: variant}
            for name in spans:
                start, end = map(int, name.split(".")[1].split("-"))
                line[f"loss, {start:,} to {end:,}"] = mean(group[name], 3)
            line |= {f"pass key, {int(name.split('.')[1]):,}": percent(group[name].mean()) for name in keys}
            lines.append(line)
        parts.append(to_markdown(pd.DataFrame(lines)))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# Reports of the commands and recipes, and of the tests


def mechanisms_table() -> str:
    """All built-in mechanisms."""
    titles = ("state", "cost", "paper", "recommendation")
    rows = [
        {
            "name": f"`{name}`",
            "directions": directions(entry),
            "learned": "yes" if entry["learned"] else "no",
            **{title: entry[title] for title in titles},
        }
        for name, entry in list_attentions().items()
    ]
    table = pd.DataFrame(rows).rename(columns={"recommendation": "when to choose"})
    table["paper"] = table["paper"].str.replace(
        r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", regex=True
    )
    return to_markdown(table, text_columns=None)


def report_summary(folder: str) -> str:
    """The summary of a committed report of `evaluate`, and its plot of quality against speed."""
    text = (RESULTS / folder / "report.md").read_text(encoding="utf-8").partition("\n## ")[0]
    summary = text.removeprefix("# Linear attention in ").strip()
    link = f"recipes/results/{folder}"
    picture = f"![Quality against speed]({link}/quality_vs_speed.png)"
    return f"{summary}\n\n[The whole report]({link}/report.md).\n\n{picture}"


def plan_table(name: str) -> str:
    """Table, first finding and plot of a committed plan."""
    data = read_json(RESULTS / name / "plan-report.json")
    settings = data["settings"]
    result = PlanResult.from_dict({**data["result"], "budget": settings["budget"]})
    flags = ["--search heads"] if settings.get("search") == "heads" else []
    flags += [f"--attention {result.attention}"]
    flags += [f"--options.{option} {value}" for option, value in settings["options"].items()]
    flags += [f"--steps {settings['steps']}", f"--data.max_length {settings['sequence_length']}"]
    machine = Results(settings, data, pd.DataFrame()).machine
    return "\n\n".join(
        [
            f"{data['model']['name']} ({data['model']['parameters']:,} parameters), `{' '.join(flags)}`, {machine}; a "
            "star marks the plan:",
            to_markdown(result.formatted_table().reset_index(), text_columns=None),
            data["summary"][0],
            f"![Perplexity and costs by the number of {result.part} converted](recipes/results/{name}/curve.png)",
        ]
    )


EXACT, CONTROL = smollm2.EXACT, smollm2.CONTROL
#: The conversions of SmolLM2 that the short table shows.
SMOLLM2_ROWS = (EXACT, "mixture, untrained", "mixture, trained", "window, trained", "store, trained", CONTROL)
SMOLLM2_FOLDERS = {
    "smollm2-probe": "probe only, untrained",
    "smollm2-short-probe-untrained": "short probe, untrained",
    "smollm2-untrained": "untrained",
    "smollm2-short-probe": "short probe, trained",
    "smollm2": "trained",
}


def smollm2_table(rows: Sequence[str] = ()) -> str:
    """The committed conversions of SmolLM2: a row for each variant (or some), what it is at 2,048 and 8,192 tokens."""
    measured: dict[str, Any] = {}
    for folder, kind in SMOLLM2_FOLDERS.items():
        results = read_json(RESULTS / folder / "results.json")
        for name in (EXACT, *smollm2.VARIANTS):
            label = name if name in (EXACT, CONTROL) else f"{name}, {kind}"
            measured |= {label: results[name]} if name in results else {}
    table = smollm2.summary_table({name: one for name, one in measured.items() if not rows or name in rows})
    shown = [name for name in table if name.endswith(("variant", "2,048", "8,192"))]
    return to_markdown(table[shown], text_columns=None)


def sentence_encoder_tables() -> str:
    """How near the converted sentence encoder is to the exact one, and its search in long documents."""
    tables = sentence_encoder.tables(read_json(RESULTS / "sentence-encoder" / "results.json"))
    return "\n\n".join(map(to_markdown, tables))


def architectures_summary() -> str:
    """The outcomes of the test over all model types, in two sentences."""
    results = read_json("architectures.json")
    counts = results["counts"]["elu"]
    return (
        "[A test](recipes/results/architectures.md) over every model type of Transformers "
        f"{results['environment']['versions']['transformers']} builds a tiny random model of each, patches it and "
        "checks it (gradients, padding, causality, decoding, saving, unpatching). Of "
        f"{sum(counts.values())} cases {counts['works']} work, {counts['refused']} are refused with an error that says "
        f"why, {counts['cannot be built tiny']} could not be built or fed there and say nothing, {counts['wrong']} are "
        "wrong."
    )


# --------------------------------------------------------------------------------------------------------------------
# The pages

#: Name of the marks -> function that makes the table. Links are relative to the root of the repository.
TABLES: dict[str, Callable[[], str]] = {
    "benchmark-forward": lambda: attention_tables(Results.read("attention.json.gz")),
    "compiled": lambda: compiled_table(Results.read("compiled.json")),
    "fidelity": lambda: fidelity_tables(Results.read("fidelity.json")),
    "linear-part": lambda: linear_part_table(Results.read("linear-part.json")),
    "memory": lambda: memory_tables(Results.read("memory.json")),
    "onnx": lambda: onnx_table(Results.read("onnx.json")),
    "quantization": lambda: quantization_table(Results.read("quantization.json")),
    "stream": lambda: stream_table(Results.read("stream.json")),
    "transfer-cost": lambda: transfer_cost_table(Results.read("transfer-cost.json")),
    "architectures": architectures_summary,
    "conversion": conversion_table,
    "evaluate": lambda: report_summary("evaluate-minilm").partition("\n\n")[2],
    "glue": glue_table,
    "glue-exact-heads": lambda: glue_table("glue-exact-heads.json"),
    "benchmark": headline,
    "length-tricks": length_tricks_tables,
    "mechanisms": mechanisms_table,
    "packages": lambda: packages_table(read_json("packages.json")),
    "plan": lambda: plan_table("plan-stories260k"),
    "plan-heads": lambda: plan_table("plan-smollm2"),
    "long": proteins_summary,
    "sentence-encoder": sentence_encoder_tables,
    "smollm2": lambda: smollm2_table(SMOLLM2_ROWS),
    "smollm2-controls": smollm2_table,
    "transfer-loss": transfer_loss_table,
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
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        before, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
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
