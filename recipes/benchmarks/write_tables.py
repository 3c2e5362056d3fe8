"""Write the generated tables of README.md, docs/ and recipes/results/README.md from the registry and recipes/results/.

    python -m recipes.benchmarks.write_tables            # some seconds
    python -m recipes.benchmarks.write_tables --check    # writes nothing; exit code 1 where a file is out of date

A table is written between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, wherever these marks are.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import pandas as pd

from hf_linear_attn import list_attentions
from hf_linear_attn.cli.listing import directions
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.study.tables import EMPTY, to_markdown
from hf_linear_attn.utils.formatting import fixed, format_bytes, format_seconds
from hf_linear_attn.utils.timing import crossover, is_measurable

from .. import rivals, sentence_encoder, smollm2
from ..tables import RESULTS, ROOT, read_json

FILES = ("README.md", "recipes/README.md", "recipes/results/README.md", "docs/*.md")
MARK = re.compile(r"<!-- (?P<name>[\w-]+):begin -->\n.*?<!-- (?P=name):end -->", re.DOTALL)
#: A name as code.
CODE = "`{}`".format

# --------------------------------------------------------------------------------------------------------------------
# Results and text


@dataclass(frozen=True)
class Results:
    """A file of recipes/results: its settings, the machine, and its rows. Nested values have dotted columns."""

    settings: dict[str, Any]
    machine: str
    rows: pd.DataFrame

    @classmethod
    def read(cls, path: str | Path) -> Self:
        data = read_json(path)
        return cls(data["settings"], machine_of(data["environment"]), pd.json_normalize(data["rows"]))

    def captioned(self, table: pd.DataFrame, text_columns: int = 1) -> str:
        """Return a table of these rows below the machine."""
        return f"{self.machine}.\n\n{to_markdown(table, text_columns=text_columns)}"


def machine_of(environment: dict[str, Any]) -> str:
    """Return processor, threads, torch version, and the load average at the start, where it is known."""
    hardware, versions = environment["hardware"], environment["versions"]
    name = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
    load = hardware["load_average_at_start"]
    text = f"{name}, threads: {hardware['threads']}, torch {versions['torch']}"
    return text if load is None else f"{text}, load at the start {load:.1f}"


def grid(cells: pd.Series, rows: pd.DataFrame, down: Sequence[str], across: str, title: str = "{:,}") -> pd.DataFrame:
    """Return a table of cells with the values of some columns of their rows down, and those of one across, in order."""
    table = cells.set_axis(pd.MultiIndex.from_frame(rows[[*down, across]])).unstack(sort=False)
    return table.rename(columns=title.format).rename_axis(columns=None).reset_index()


def times(value: float) -> str:
    """`0.043`, `0.43`, `4.3`, `43`, `4,300`: two significant digits."""
    if value >= 99.5:
        return f"{float(f'{value:.2g}'):,.0f}"
    digits = sum(value < limit for limit in (0.0995, 0.995, 9.95))
    return f"{value:.{digits}f}"


def mean(values: Sequence[float] | pd.Series, digits: int, scale: float = 1.0) -> str:
    """Return the mean, and behind it the standard deviation of several values (several seeds)."""
    series = scale * pd.Series(values, dtype=float).dropna()
    if series.empty:
        return EMPTY
    text = fixed(float(series.mean()), digits)
    return text if len(series) == 1 else f"{text} ± {fixed(float(series.std()), digits)}"


# --------------------------------------------------------------------------------------------------------------------
# Speed and memory

SDPA, FREE = "sdpa", "without attention"


def _with_backend(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with names such as `elu [native]` in a column without a title."""
    backends = rows["backend"].map(" [{}]".format).where(rows["backend"] != "", "")
    return rows.assign(**{"": rows["attention"] + backends})


def _forward(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["dtype"] == "float32") & (rows["pass"] == "forward")]


def attention_tables() -> str:
    """Speedup over `sdpa` of every mechanism on every backend, with the crossover."""

    def faster_from(rows: pd.DataFrame) -> str:
        if (rows["speedup.median"] == 1).all():
            return ""
        result = crossover(rows["length"].tolist(), rows["speedup.median"].tolist())
        return f"{result.length:,.0f}" if result.relation == "=" else str(result)

    results = Results.read("attention.json.gz")
    parts = [f"{results.machine}. The row sdpa shows times. Crossover: from this length on faster than sdpa."]
    for direction, rows in _with_backend(_forward(results.rows)).groupby("direction", sort=False):
        seconds = rows["seconds.median"].map(format_seconds)
        speedups = rows["speedup.median"].map(times)
        table = grid(speedups.mask(rows[""] == SDPA, seconds), rows, [""], "length")
        table["crossover"] = table[""].map(rows.groupby("").apply(faster_from, include_groups=False))
        parts += [f"**Speedup over sdpa: {direction}, float32, forward**", to_markdown(table)]
    return "\n\n".join(parts)


def memory_tables() -> str:
    """Peak memory of attention by itself, and its ratio to the output's bytes."""
    results = Results.read("memory.json")
    parts = [
        f"{results.machine}. Beyond what was in use before the call, the output included; in brackets: over the bytes "
        "of the output. What is smaller than a few hundred kilobytes is noise."
    ]
    for (direction, done), rows in _with_backend(results.rows).groupby(["direction", "pass"], sort=False):
        cells = rows["bytes"].map(format_bytes) + rows["to_output"].map(times).map(" ({})".format)
        parts.append(f"**Peak extra memory: {direction}, {done.replace('+', ' + ')}, float32**")
        parts.append(to_markdown(grid(cells, rows, [""], "length")))
    return "\n\n".join(parts)


def speed_table(lengths: Sequence[int] = (4096, 16384)) -> str:
    """Each mechanism on its fastest backend: speedup by length, time over limit, one decoding step; whole models."""
    results = Results.read("attention.json.gz")
    steps = Results.read("decoding.json.gz").rows
    rows, context = _forward(results.rows), steps["context"].max()
    rows = rows[rows["attention"] != SDPA]
    fastest = rows.groupby(["attention", "direction", "length"], sort=False)
    speedups = fastest["speedup.median"].max()
    limits = fastest["over_limit.median"].min()
    columns: dict[str, pd.Series] = {}
    for direction in ("bidirectional", "causal"):
        for length in lengths:
            cells = speedups.xs((direction, length), level=(1, 2))
            columns[f"{direction}, {length:,} tokens"] = cells.map(lambda value: f"{times(value)}×")
        columns[f"{direction}, over limit"] = limits.xs((direction, lengths[-1]), level=(1, 2)).map(times)
    last = steps[(steps["dtype"] == "float32") & (steps["batch"] == 1) & (steps["context"] == context)]
    step = last[last["attention"] != SDPA].groupby("attention")["speedup.median"].max()
    columns[f"decoding step after {context:,}"] = step.map(lambda value: f"{times(value)}×")
    table = pd.DataFrame(columns).reindex(rows["attention"].unique())
    table.index = pd.Index([CODE(name) if name in ATTENTIONS else name for name in table.index], name="")
    return "\n\n".join(
        [
            f"{results.machine}.",
            "**Times as fast as sdpa, float32, forward (12 heads of 64)**",
            to_markdown(table.reset_index()),
            f"Each mechanism on its fastest backend. Over limit: time at {lengths[-1]:,} tokens over that of PyTorch's "
            "own matrix products alone, or of as many operations. A step is compared with the growing key-value cache.",
            _whole_models(Results.read("models.json").rows),
        ]
    )


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


def short_inputs_table() -> str:
    """The speedup of the default mechanism at the lengths of most inputs, and the highest possible one behind it."""
    results = Results.read("models-short.json")
    titles = {"forward": "forward pass", "forward+backward": "training step", "prefill": "prompt", "decoding": "token"}
    rows = results.rows.assign(**{"pass": results.rows["pass"].map(titles)})
    speedups = grid(rows["speedup.median"].map("{:.2f}".format), rows, ["model", "pass", "length"], "attention", "{}")
    cells = speedups["window"] + speedups[FREE].map(" of {}".format, na_action="ignore").fillna("")
    table = grid(cells, speedups, ["model", "pass"], "length", "{:,} tokens")
    return results.captioned(table, text_columns=2)


def codes_table() -> str:
    """The speedup of windows in an encoder by the number of codes outside, and the highest possible one behind it."""
    results = Results.read("models-codes.json")
    speedups = grid(
        results.rows["speedup.median"].map("{:.2f}".format), results.rows, ["pass", "length"], "attention", "{}"
    )
    ways = {"window": "128 codes", "window, 32 codes outside": "32 codes"}
    parts = [
        speedups.assign(codes=title, cell=speedups[name] + " of " + speedups[FREE]) for name, title in ways.items()
    ]
    rows = pd.concat(parts, ignore_index=True)
    return results.captioned(grid(rows["cell"], rows, ["codes", "pass"], "length", "{:,} tokens"))


def tokens_table() -> str:
    """The time of a token of a decoder with windows over that of the exact model, by what the cache holds."""
    results = Results.read("tokens.json")
    rows = results.rows[results.rows["attention"] != SDPA].sort_values("batch", kind="stable")
    cells = (1 / rows["speedup.median"]).map("{:.2f}".format)
    return results.captioned(grid(cells, rows, ["attention", "batch"], "length", "{:,} tokens"))


def terms_table(path: str = "models-terms.json") -> str:
    """Models with terms in their logits: the speedup of `window` of the highest possible one, and its peak memory."""
    results = Results.read(path)
    measured = results.rows.set_index(["model", "length", "attention"])
    rows = results.rows.drop_duplicates(["model", "length"])[["model", "length"]]
    seconds = measured["seconds.median"].unstack()
    peaks = measured["bytes"].unstack()
    cells = []
    for key in map(tuple, rows.to_numpy()):
        window, exact, free = (seconds.loc[key].get(name, float("nan")) for name in ("window", SDPA, FREE))
        if pd.isna(exact):
            cells.append(f"{free / window:.2f} of the highest")
        else:
            memory = peaks.loc[key, "window"] / peaks.loc[key, SDPA]
            cells.append(f"{exact / window:.2f} of {exact / free:.2f}; memory {memory:.2f}")
    caption = f"{results.machine}. Exact attention is measured up to {results.settings['longest_exact']:,} tokens."
    table = grid(pd.Series(cells), rows, ["model"], "length", "{:,} tokens")
    return f"{caption}\n\n{to_markdown(table.fillna(EMPTY))}"


def compiled_table() -> str:
    """Eager and compiled time of a forward pass and of a token, exact and linear."""
    results = Results.read("compiled.json")
    length, rows = results.settings["length"], results.rows
    titles = {"forward": f"forward pass of {length:,} tokens", "token": f"a token after {length:,}"}
    columns = {f"{name}, ms": (1e3 * rows[f"{name}.median"]).map("{:.1f}".format) for name in ("eager", "compiled")}
    columns["eager / compiled"] = rows["speedup.median"].map("{:.2f}×".format)
    rows["attention"] = rows["attention"].map(CODE)
    cells = pd.DataFrame(columns).set_axis(pd.MultiIndex.from_frame(rows[["model", "dtype", "attention", "work"]]))
    table = cells.unstack(sort=False).swaplevel(axis=1)[[*titles]].fillna("")
    table.columns = pd.Index([f"{titles[work]}, {name}" for work, name in table.columns])
    return f"{results.machine}; medians.\n\n{to_markdown(table.reset_index(), text_columns=3)}"


def transfer_cost_tables() -> str:
    """What a step of attention transfer costs in forward passes, by mechanism and length."""
    results = Results.read("transfer-cost.json")
    parts = [f"{results.machine}."]
    for model, rows in results.rows.groupby("model", sort=False):
        rows = rows.assign(**{model: rows["attention"].map(CODE)})
        cells = rows["forward_passes.median"].map("{:.2f}".format)
        parts.append(to_markdown(grid(cells, rows, [model], "length", "{:,} tokens")))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# ONNX Runtime


def runtimes_table(path: str, unit: str) -> str:
    """Seconds of a pass, milliseconds of a token after it, or megabytes of the process, by runtime and length."""
    results = Results.read(path)
    column, scale, form = {
        "s": ("seconds", 1, "{:.2f}"),
        "ms": ("token_seconds", 1000, "{:.0f}"),
        "MB": ("megabytes", 1, "{:,.0f}"),
    }[unit]
    rows = results.rows
    names = results.rows["attention"].map(lambda name: CODE(name) if name in ATTENTIONS else name)
    cells = (scale * rows[column]).map(form.format)
    table = grid(cells, rows.assign(attention=names), ["runtime", "attention"], "length", f"{{:,}} tokens, {unit}")
    return results.captioned(table.fillna(EMPTY), text_columns=2)


# --------------------------------------------------------------------------------------------------------------------
# Conversions

#: Stages of a conversion on GLUE, and what the table calls them; the last one has the name of the row's variant.
STAGES = {"teacher": "as given", "patched": "untrained", "transferred": "after transfer", "distilled": None}
#: The columns of the table.
TASK_TITLES = {
    "stsb": "STS-B, Pearson",
    "mrpc": "MRPC, accuracy",
    "rte": "RTE, accuracy",
    "cola": "CoLA, Matthews",
    "sst2": "SST-2, accuracy",
}


def glue_scores(path: str) -> pd.DataFrame:
    """Return tidy scores: a row for each mechanism, stage, task and seed, with the main metric of the task."""
    tidy = []
    for row in read_json(path)["rows"]:
        for stage, title in STAGES.items():
            if stage in row and (stage != "teacher" or row["mechanism"] == "softmax"):
                facts = {name: row[name] for name in ("mechanism", "task", "seed", "variant")}
                tidy.append({**facts, "stage": title or row["variant"], "score": row[stage][row["metric"]]})
    scores = pd.DataFrame(tidy).drop_duplicates(["mechanism", "stage", "task", "seed"], keep="last")
    for name, order in (("mechanism", ()), ("stage", filter(None, STAGES.values()))):
        scores[name] = pd.Categorical(scores[name], [*dict.fromkeys([*order, *scores[name]])])
    return scores.sort_values(["mechanism", "stage"], kind="stable")


def recovered(scores: pd.DataFrame, control: pd.DataFrame) -> str:
    """Return the mean over tasks of the score over the control's, of the seeds that both have."""
    both = scores.merge(control, on=["task", "seed"], suffixes=("", "_control"))
    means = both.groupby("task")[["score", "score_control"]].mean()
    return EMPTY if means.empty else f"{100 * (means['score'] / means['score_control']).mean():.1f} %"


def glue_table(path: str = "glue.json", stages: Sequence[str] = ()) -> str:
    """Mechanisms (at some stages, or at all) by tasks: the metric, and the share of the control's that is recovered.

    Stages before the last training are compared with the control after its distillation.
    """
    scores, lines = glue_scores(path), []
    tasks, variants = scores["task"].unique(), set(scores["variant"])
    for (mechanism, stage), group in scores.groupby(["mechanism", "stage"], observed=True):
        if stages and stage not in stages:
            continue
        line = {"mechanism": CODE(mechanism)} | ({} if len(stages) == 1 else {"": stage})
        for task in tasks:
            line[TASK_TITLES[task]] = mean(group[group["task"] == task]["score"], 1, 100)
        control = stage if stage in variants else "distilled"
        control_scores = scores[(scores["mechanism"] == "softmax") & (scores["stage"] == control)]
        lines.append({**line, "recovered": recovered(group, control_scores)})
    return to_markdown(pd.DataFrame(lines), text_columns=1 if len(stages) == 1 else 2)


def terms_quality_table() -> str:
    """Tiny models with terms in their logits: what each stage of the conversion makes of their metric."""
    names = {
        "deberta": "DeBERTa on SST-2",
        "t5": "T5, words that come again",
        "t5-window-alone": "the same, nothing outside of windows",
    }
    titles = {
        "teacher": "exact",
        "without_attention": "without attention",
        "patched": "calibrated only",
        "transferred": "after attention transfer",
        "converted": "as saved",
        "control": "exact, trained as long",
    }
    lines = []
    for row in read_json("terms.json")["rows"]:
        cells = {title: f"{row[stage][row['metric']]:.3f}" for stage, title in titles.items() if stage in row}
        lines.append({"model and task": names[row["name"]], "metric": row["metric"], **cells})
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def transfer_loss_table() -> str:
    """The perplexity of a converted decoder before and after attention transfer, by the loss of the transfer."""
    titles = {"teacher": "exact", "patched": "untrained", "transferred": "after attention transfer"}
    lines = []
    for path in sorted((RESULTS / "transfer-loss").glob("*.json")):
        scores = read_json(path)["scores"]
        cells = {title: f"{scores[name]['perplexity']:.2f}" for name, title in titles.items()}
        lines.append({"loss": f"`--transfer.loss {path.stem}`", **cells})
    return to_markdown(pd.DataFrame(lines))


def fidelity_tables() -> str:
    """One table for each checkpoint: every mechanism before and after attention transfer."""
    columns = {
        "kl": ("KL, nats", 2),
        "output_error": ("output error", 2),
        "final_cosine": ("final cosine", 3),
        "perplexity": ("perplexity", 2),
        "sentence_cosine": ("sentence cosine", 3),
    }
    parts = []
    for model, rows in Results.read("fidelity.json").rows.groupby("model", sort=False):
        lines = []
        for attention, group in rows.groupby("attention", sort=False):
            line = {model: CODE(attention)}
            for name, (title, digits) in columns.items():
                if rows[name].notna().any():
                    line[title] = "→".join(fixed(one, digits) for one in group[name].dropna()) or EMPTY
            lines.append(line)
        parts.append(to_markdown(pd.DataFrame(lines), text_columns=None))
    return "\n\n".join(parts)


def linear_part_table() -> str:
    """The losses of windows by what is outside of them, a column for each text; worth in brackets."""
    rows, lines = Results.read("linear-part.json").rows, []
    losses = rows.set_index(["model", "window", "outside", "text"])["loss"]
    for (model, window, outside), group in rows.groupby(["model", "window", "outside"], sort=False, dropna=False):
        width = EMPTY if pd.isna(window) else f"{window:.0f}"
        line = {"model": model.partition(".")[0], "window": width, "outside": outside}
        for text, loss in zip(group["text"], group["loss"], strict=True):
            without = losses.get((model, window, "nothing", text))
            worth = f" ({without - loss:+.3f})" if without is not None and outside != "nothing" else ""
            line[text.partition(".")[0].replace("wiki", "WikiText-2")] = f"{loss:.3f}{worth}"
        lines.append(line)
    return to_markdown(pd.DataFrame(lines), text_columns=3)


#: Rows and columns of the README's table of encoders.
ENCODER_LENGTHS = (256, 512, 2048)
ENCODER_COLUMNS = ("nothing", "hedgehog, calibrated", "128 codes, calibrated")


def encoder_start_table(lengths: Sequence[int] = (), outside: Sequence[str] = (), metric: str = "cosine") -> str:
    """How near encoders come to exact ones by what is outside of their windows: the mean over seeds."""
    rows = Results.read("encoder-start.json").rows
    rows = rows[rows["length"].isin(lengths or rows["length"]) & rows["outside"].isin(outside or rows["outside"])]
    rows = rows.assign(tokens=rows["length"].map("{:,}".format), text=rows["text"].str.partition(".")[0])
    table = rows.pivot_table(values=metric, index=["tokens", "text"], columns="outside", sort=False)
    table = table.map(lambda number: fixed(number, 4), na_action="ignore").reset_index()
    return to_markdown(table, text_columns=2)


def budgets_table() -> str:
    """Conversions by `convert` with a budget alone: what was chosen, and what it costs."""
    lines = []
    for path in sorted((RESULTS / "budgets").glob("*.json")):
        data = read_json(path)
        scores, choice, metric = data["scores"], data["choice"], data["score"]["metric"]
        parts = data["linear_parts"] or ()
        heads = choice["heads"]
        recall = data["recall"]
        timed = zip(data["speed"]["lengths"], data["speed"]["student"], strict=True)
        lines.append(
            {
                "model": path.stem,
                "budget": data["config"]["budget"],
                "exact heads": f"{sum(head['chosen'] for head in heads)} of {len(heads)}",
                "windows": f"{choice['plan']['default']['window_size']:,}",
                "linear parts kept": f"{sum(part['kept'] for part in parts)} of {len(parts)}" if parts else EMPTY,
                "metric": metric,
                "exact": f"{scores['teacher'][metric]:.3f}",
                "patched": f"{scores['patched'][metric]:.3f}",
                "as saved": f"{scores['converted'][metric]:.3f}",
                "recall: exact": _interval(recall["teacher"]),
                "recall: as saved": _interval(recall["student"]),
                "speedup": ", ".join(
                    f"{row['speedup']:.2f} at {length:,}"
                    for length, row in timed
                    if is_measurable(row["speedup_p20"], row["speedup_p80"])
                )
                or EMPTY,
            }
        )
    return to_markdown(pd.DataFrame(lines), text_columns=None)


def _interval(recall: dict[str, Any]) -> str:
    return f"{recall['recall']:.2f} [{recall['low']:.2f}, {recall['high']:.2f}]"


#: Conversions of SmolLM2.
SMOLLM2_FOLDERS = {"smollm2-calibrated": "calibrated", "smollm2": "trained"}


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


def smollm2_table() -> str:
    """Committed conversions of SmolLM2: a row for each variant, what it is at 2,048 and 8,192 tokens."""
    measured: dict[str, Any] = {}
    for folder, kind in SMOLLM2_FOLDERS.items():
        results = read_json(f"{folder}/results.json")
        for name in (smollm2.EXACT, *smollm2.VARIANTS):
            label = name if name in (smollm2.EXACT, smollm2.CONTROL) else f"{name}, {kind}"
            measured |= {label: results[name]} if name in results else {}
    table = smollm2.summary_table(measured)
    shown = [name for name in table if name.endswith(("variant", "2,048", "8,192"))]
    return to_markdown(table[shown], text_columns=None)


def rivals_table(folder: str, variants: Sequence[str] = (), columns: Sequence[str] = ()) -> str:
    """Ways to a smaller cache of a decoder: a row for each length and variant, or some of them."""
    rows = read_json(f"{folder}/results.json")["rows"]
    table = rivals.summary_table([row for row in rows if not variants or row["variant"] in variants])
    return to_markdown(table[_columns(table, columns)], text_columns=2)


def _columns(names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """Return the columns whose names begin with one of those chosen, or all."""
    return [name for name in names if not chosen or name.startswith(tuple(chosen))]


def sentence_encoder_tables() -> str:
    """How near the converted sentence encoder is to the exact one, and its search in long documents."""
    return "\n\n".join(map(to_markdown, sentence_encoder.tables(read_json("sentence-encoder/results.json"))))


# --------------------------------------------------------------------------------------------------------------------
# Long inputs


def beyond_length_table(edges: Sequence[int] = (0, 8192, 12288, 16384)) -> str:
    """Loss by position beyond the length of training, the mean over the texts: a row for each rotation in all heads."""
    shown = ("unchanged", "YaRN of factor 2 everywhere", "YaRN of factor 2, attention_factor 1")
    rows = pd.json_normalize(read_json("beyond-length.json")["rows"]).sort_values("model", kind="stable")
    rows = rows[rows["rotation"].isin(shown)].set_index(["model", "rotation"])
    loss = rows.filter(like="loss.").groupby(level=[0, 1], sort=False).mean()
    spans = {column: tuple(map(int, column.removeprefix("loss.").split("-"))) for column in loss}
    columns = {}
    for first, last in pairwise(edges):
        inside = {column: stop - start for column, (start, stop) in spans.items() if first <= start and stop <= last}
        total = sum(size * loss[column] for column, size in inside.items())
        columns[f"{first:,} to {last:,}"] = total / sum(inside.values())
    return to_markdown(pd.DataFrame(columns).map("{:.2f}".format).reset_index(), text_columns=2)


def proteins_table(strata: Sequence[str] = ("> 1,024", "> 2,048")) -> str:
    """Quality beside costs, one row for each variant and length; exact attention first."""
    rows = Results.read("proteins.json").rows
    costs = Results.read("proteins-costs.json").rows
    known, lines = costs.set_index(["variant", "length"]), []
    order = sorted(rows["variant"].unique(), key=lambda name: (name != "softmax", "softmax" not in name))
    rows["variant"] = pd.Categorical(rows["variant"], order)
    for (variant, pieces, length), group in rows.groupby(["variant", "pieces", "length"], observed=True):
        line = {"attention": CODE(variant), "residues seen": f"{'in pieces of ' * pieces}{length:,}"}
        for name in strata:
            count = int(rows[f"strata.{name}.rows"].iloc[0])
            line[f"MCC, {name} ({count:,})"] = _score(group, f"strata.{name}.mcc")
        if (variant, length) in known.index and not pieces:
            cost = known.loc[(variant, length)]
            line |= {f"{kind}, s": f"{cost[f'{kind}.seconds_per_1000']:.0f}" for kind in ("training", "inference")}
            line["memory added"] = f"{cost['peak_bytes'] / 1e6:.0f} MB"
        lines.append(line)
    return to_markdown(pd.DataFrame(lines), text_columns=2)


def _score(group: pd.DataFrame, name: str) -> str:
    """Mean and deviation over seeds; of one seed the error of its bootstrap."""
    values, errors = group[name], group[f"{name}_error"]
    return mean(values, 3) if len(values) > 1 else f"{values.iloc[0]:.3f} ± {errors.iloc[0]:.3f}"


# --------------------------------------------------------------------------------------------------------------------
# Serving


def serving_table() -> str:
    """A server of a converted model beside those of the exact one: answers a minute, and the second turn of a chat."""
    results = Results.read("serving.json")
    lines = []
    for server, group in results.rows.groupby("server", sort=False):
        answers = group[group["part"] == "answers"]
        chats = group[group["part"] == "second turn"]
        line = {"server": server, "answers a minute": f"{answers['answers_a_minute'].iloc[0]:.1f}"}
        for tokens, seconds in zip(chats["tokens"], chats["seconds_to_first_token"], strict=True):
            line[f"first token of a second turn after {tokens:,} tokens"] = f"{seconds:.2f} s"
        lines.append(line)
    return results.captioned(pd.DataFrame(lines))


# --------------------------------------------------------------------------------------------------------------------
# Mechanisms, reports of the commands, and tests


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


def evaluation_summary(folder: str = "recipes/results/evaluate-minilm") -> str:
    """The table of a committed report of `evaluate`, and its plot of quality against speed."""
    report = (ROOT / folder / "report.md").read_text(encoding="utf-8")
    head, table = report.split("\n\n")[1], report.partition("## All mechanisms\n\n")[2].partition("\n\n")[0]
    table = re.sub("-{3,}", "---", re.sub(" {2,}", " ", table))
    links = f"[The whole report]({folder}/report.md).", f"![Quality against speed]({folder}/quality_vs_speed.png)"
    return "\n\n".join([head, table, *links])


# --------------------------------------------------------------------------------------------------------------------
# The pages

#: Name of the marks -> function that makes the table. Links are relative to the root of the repository.
TABLES: dict[str, Callable[[], str]] = {
    "benchmark": speed_table,
    "benchmark-forward": attention_tables,
    "beyond-length": beyond_length_table,
    "budgets": budgets_table,
    "compiled": compiled_table,
    "conversion": partial(glue_table, stages=("distilled",)),
    "encoder-start": encoder_start_table,
    "encoder-start-neighbors": partial(encoder_start_table, metric="same_neighbor"),
    "encoder-start-short": partial(encoder_start_table, ENCODER_LENGTHS, ENCODER_COLUMNS),
    "evaluate": evaluation_summary,
    "fidelity": fidelity_tables,
    "glue": glue_table,
    "glue-exact-heads": partial(glue_table, "glue-exact-heads.json"),
    "glue-start": partial(glue_table, "glue-start.json"),
    "linear-part": linear_part_table,
    "long": proteins_table,
    "mechanisms": mechanisms_table,
    "memory": memory_tables,
    "rivals": partial(rivals_table, "rivals", RIVALS, RIVALS_COLUMNS),
    "rivals-short": partial(rivals_table, "rivals", RIVALS_ROWS, RIVALS_COLUMNS),
    "runtimes-encoder": partial(runtimes_table, "runtimes.json", "s"),
    "runtimes-onnx": partial(runtimes_table, "runtimes-onnx.json", "s"),
    "runtimes-onnx-prompt": partial(runtimes_table, "runtimes-onnx-decoder.json", "s"),
    "runtimes-onnx-token": partial(runtimes_table, "runtimes-onnx-decoder.json", "ms"),
    "runtimes-encoder-memory": partial(runtimes_table, "runtimes.json", "MB"),
    "runtimes-prompt": partial(runtimes_table, "runtimes-decoder.json", "s"),
    "runtimes-token": partial(runtimes_table, "runtimes-decoder.json", "ms"),
    "short-inputs": short_inputs_table,
    "short-inputs-codes": codes_table,
    "terms-speed": terms_table,
    "terms-quality": terms_quality_table,
    "terms-decoders": partial(terms_table, "models-terms-decoders.json"),
    "tokens": tokens_table,
    "sentence-encoder": sentence_encoder_tables,
    "serving": serving_table,
    "smollm2": smollm2_table,
    "transfer-cost": transfer_cost_tables,
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
