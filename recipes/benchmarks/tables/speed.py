"""Tables of speed and memory: attention by itself, whole models, runtimes, serving."""

from collections.abc import Sequence

import pandas as pd

from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.study.tables import EMPTY, to_markdown
from hf_linear_attn.utils.formatting import format_bytes, format_seconds
from hf_linear_attn.utils.timing import crossover

from .text import CODE, Results, grid, times

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
