"""Markdown tables of committed results: conversions, long inputs, streams, fidelity, packing, profile, compilation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"

Row = dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[Any]], *, text_columns: int | None = 1) -> str:
    """Return a Markdown table; the columns after the first `text_columns` are aligned right (None: no column is)."""
    left = len(titles) if text_columns is None else text_columns
    rules = ["---"] * left + ["---:"] * (len(titles) - left)
    lines = [titles, rules, *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def machine(environment: dict[str, Any]) -> str:
    """Return processor, threads and torch version as text."""
    hardware, versions = environment["hardware"], environment["versions"]
    name = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
    return f"{name}, threads: {hardware['threads']}, torch {versions['torch']}"


def machine_with_load(environment: dict[str, Any]) -> str:
    """Return `machine` with the load average at the start."""
    load = environment["hardware"]["load_average_at_start"]
    return machine(environment) + ("" if load is None else f", load at the start {load:.1f}")


# --------------------------------------------------------------------------------------------------------------------
# Conversion on GLUE

#: Stages of a row in `glue.json`, and what the table calls them. None stands for the row's own variant.
STAGES = {"patched": "untrained", "transferred": "after transfer", "distilled": None}
CONTROL_STAGES = {"teacher": "as given", "distilled": None}

Scores = dict[tuple[str, str], dict[str, dict[int, float]]]
"""Score by mechanism and stage, then by task and seed."""


def glue_scores(rows: Sequence[Row]) -> Scores:
    """Collect the main metric of each task from the rows of `glue.json`."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    scores: Scores = {}
    for row in rows:
        stages = CONTROL_STAGES if row["mechanism"] == "softmax" else STAGES
        for stage, name in stages.items():
            if stage in row:
                key = (row["mechanism"], name or row["variant"])
                by_task = scores.setdefault(key, {task: {} for task in tasks})
                by_task[row["task"]][row["seed"]] = row[stage][row["metric"]]
    return scores


def glue_table(path: Path = RESULTS / "glue.json") -> str:
    """Mechanisms by tasks: the metric (mean over seeds), and the share of the control's that is recovered."""
    rows = read_json(path)["rows"]
    scores = glue_scores(rows)
    metrics = {row["task"]: row["metric"] for row in rows}
    variants = {row["variant"] for row in rows}
    lines = []
    for (mechanism, stage), by_task in scores.items():
        # Stages before the last training are compared with the control after its distillation.
        control = scores.get(("softmax", stage if stage in variants else "distilled"), {})
        cells = [_mean_and_deviation([*by_task[task].values()]) for task in metrics]
        lines.append([f"`{mechanism}`", stage, *cells, _recovered(by_task, control)])
    titles = ["mechanism", "", *(f"{task}, {metric}" for task, metric in metrics.items()), "recovered"]
    return markdown_table(titles, lines, text_columns=2)


def conversion_table(path: Path = RESULTS / "glue.json") -> str:
    """The distilled score of some tasks, and the share recovered after transfer and after distillation."""
    from hf_linear_attn.registry import ATTENTIONS, list_attentions

    list_attentions()
    scores = glue_scores(read_json(path)["rows"])
    control = scores["softmax", "distilled"]
    lines = []
    for mechanism in dict.fromkeys(mechanism for mechanism, _ in scores):
        distilled = scores[mechanism, "distilled"]
        transferred = scores.get((mechanism, "after transfer"))
        learned = mechanism != "softmax" and ATTENTIONS.get(mechanism.partition(" of ")[0]).learned
        lines.append(
            [
                f"`{mechanism}`" + (" (control)" if mechanism == "softmax" else ""),
                "yes" if learned else "no",
                *(_mean_and_deviation([*distilled[task].values()]) for task in ("stsb", "mrpc", "sst2")),
                "–" if transferred is None else _recovered(transferred, control),
                _recovered(distilled, control),
            ]
        )
    titles = ["mechanism", "learned", "STS-B, Pearson", "MRPC, accuracy", "SST-2, accuracy"]
    titles += ["recovered after transfer", "recovered after distillation"]
    return markdown_table(titles, lines, text_columns=2)


def _recovered(scores: dict[str, dict[int, float]], control: dict[str, dict[int, float]]) -> str:
    """Mean over tasks of the score over that of the control, over the seeds that both have."""
    shares = []
    for task, by_seed in scores.items():
        seeds = by_seed.keys() & control.get(task, {}).keys()
        total = sum(control[task][seed] for seed in seeds)
        if total:
            shares.append(sum(by_seed[seed] for seed in seeds) / total)
    if not shares:
        return "–"
    note = f" ({len(shares)} of {len(scores)})" if len(shares) < len(scores) else ""
    return f"{100 * statistics.mean(shares):.1f} %{note}"


def _mean_and_deviation(scores: Sequence[float]) -> str:
    if not scores:
        return "–"
    text = f"{100 * statistics.mean(scores):.1f}"
    return text if len(scores) == 1 else f"{text} ± {100 * statistics.stdev(scores):.1f}"


# --------------------------------------------------------------------------------------------------------------------
# Decoders


def lm_tables(folder: Path = RESULTS / "lm") -> str:
    """One table for each decoder: perplexity of every variant after the same steps."""
    return "\n\n".join(_lm_table(read_json(path)) for path in sorted(folder.glob("*.json")))


def _lm_table(results: dict[str, Any]) -> str:
    contexts, rows = list(results["pretrained"]), results["rows"]
    before = [f"{results['pretrained'][context]['perplexity']:.2f}" for context in contexts]
    lines = [["pretrained, exact", "0", *before, ""]]
    means = {
        variant: [
            statistics.mean(row["perplexity"][context]["perplexity"] for row in rows if row["variant"] == variant)
            for context in contexts
        ]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    for variant, values in means.items():
        steps = next(row["steps"] for row in rows if row["variant"] == variant)
        ratio = f"{100 * (values[0] / means['softmax'][0] - 1):+.1f} %" if "softmax" in means else "–"
        cells = [f"{value:.2f}" for value in values]
        lines.append([variant, f"{steps['transfer']} + {steps['distill']}", *cells, ratio])
    titles = ["", "steps (transfer + tuning)", *(f"context {context}" for context in contexts)]
    return (
        f"**{results['name']}**, trained on sequences of {rows[0]['settings']['data']['max_length']} tokens; window of "
        f"{results['window']} tokens; perplexity over {results['pretrained'][contexts[0]]['tokens']:,} held-out "
        "tokens, half a context apart:\n\n"
        + markdown_table([*titles, "to the tuned exact model"], lines, text_columns=2)
    )


# --------------------------------------------------------------------------------------------------------------------
# Long inputs

#: Name of a part -> unit of length, and title.
LONG_PARTS = {
    "proteins": ("residues", "Proteins (DeepLoc 2.0 SwissProt; is there a segment in a membrane?)"),
    "reviews": ("tokens", "Film reviews (IMDB)"),
}

Group = tuple[str, int, int, bool]
"""Variant, length, steps, and whether inputs are scored in pieces."""


def _group_seeds(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """Group rows that differ in their seed only, exact attention first."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    variants.sort(key=lambda name: (name != "softmax", "softmax" not in name))
    ordered = sorted(rows, key=lambda row: (variants.index(row["variant"]), row["pieces"], row["length"], row["steps"]))
    groups: dict[Group, list[Row]] = {}
    for row in ordered:
        groups.setdefault((row["variant"], row["length"], row["steps"], row["pieces"]), []).append(row)
    return groups


def _group_cells(group: Group) -> list[str]:
    variant, length, _, pieces = group
    return [f"`{variant}`", f"in pieces of {length:,}" if pieces else f"{length:,}"]


def _mean_of_seeds(rows: Sequence[Row], stratum: str, metric: str) -> str:
    """Mean and deviation over seeds; of one seed, the bootstrap error of the Matthews correlation."""
    values = [row["strata"][stratum][metric] for row in rows]
    if len(values) > 1:
        return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    error = rows[0]["strata"][stratum].get(f"{metric}_error")
    return f"{values[0]:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _quality_table(rows: Sequence[Row]) -> str:
    """One row for each variant and length: metrics by stratum, processor seconds of training and of scoring."""
    strata = rows[0]["strata"]
    titles = ["attention", "cut to", "steps"]
    for name, stratum in strata.items():
        titles += [f"MCC, {name} ({stratum['rows']:,})", f"AUC, {name}"]
    lines = []
    for group, members in _group_seeds(rows).items():
        cells = [*_group_cells(group), str(group[2])]
        for name in strata:
            cells += [_mean_of_seeds(members, name, "mcc"), _mean_of_seeds(members, name, "auc")]
        training = statistics.mean(row["training"]["cpu_seconds"] for row in members)
        scoring = statistics.mean(row["score_cpu_seconds"] for row in members)
        lines.append([*cells, f"{training:.0f}", f"{scoring:.0f}"])
    return markdown_table([*titles, "training, s", "scoring, s"], lines, text_columns=2)


def _costs_table(results: dict[str, Any]) -> str:
    """One row for each variant and length: seconds for 1,000 inputs, speed against exact attention, memory."""
    titles = ["attention", "cut to", "training, s", "faster", "inference, s", "faster", "memory added"]
    lines = []
    for length, by_variant in results["lengths"].items():
        for variant, costs in by_variant.items():
            cells = [f"`{variant}`", f"{int(length):,}"]
            for kind in ("training", "inference"):
                cells += [f"{costs[kind]['seconds_per_1000']:.1f}", f"{costs[kind]['speedup']:.2f}×"]
            lines.append([*cells, _megabytes(costs["peak_bytes"])])
    return markdown_table(titles, lines, text_columns=2)


def _megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.0f} MB"


def long_tables(folder: Path = RESULTS / "long") -> str:
    """Quality and costs of each part."""
    sections = []
    for name, (unit, title) in LONG_PARTS.items():
        rows, costs = read_json(folder / f"{name}.json")["rows"], read_json(folder / f"{name}-costs.json")
        seeds = sorted({row["seed"] for row in rows})
        seed_text = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
        settings = costs["settings"]
        sections += [
            f"**{title}**: quality ({machine(rows[0]['environment'])}; {seed_text}):",
            _quality_table(rows),
            f"**{title}**: processor seconds for 1,000 inputs, measured on {settings['inputs']} held-out inputs beyond "
            f"{settings['beyond']:,} {unit} (mean: {settings['mean_tokens']:,.0f}), all variants interleaved "
            f"({machine(costs['environment'])}); memory that a forward and backward pass of one full length adds:",
            _costs_table(costs),
        ]
        longest = costs.get("longest")
        if longest is not None:
            variants = [
                f"`{variant}` {seconds:.1f} s and {longest['training'][variant]:.1f} s "
                f"({_megabytes(longest['peak_bytes'][variant])})"
                for variant, seconds in longest["inference"].items()
            ]
            sections.append(
                f"The longest held-out input, uncut ({longest['tokens']:,} {unit} with its two special tokens): "
                f"inference, and forward with backward (added memory): {', '.join(variants)}."
            )
    return "\n\n".join(sections)


def long_summary(folder: Path = RESULTS / "long", strata: Sequence[str] = ("> 1,024", "> 2,048")) -> str:
    """Quality beside costs of the proteins, one row for each variant and length."""
    rows, costs = read_json(folder / "proteins.json")["rows"], read_json(folder / "proteins-costs.json")
    counts = rows[0]["strata"]
    titles = ["attention", "residues seen", *(f"MCC, {name} ({counts[name]['rows']:,})" for name in strata)]
    lines = []
    for group, members in _group_seeds(rows).items():
        variant, length, _, pieces = group
        cells = [*_group_cells(group), *(_mean_of_seeds(members, name, "mcc") for name in strata)]
        cost = None if pieces else costs["lengths"].get(str(length), {}).get(variant)
        if cost is None:
            cells += ["–", "–", "–"]
        else:
            cells += [f"{cost[kind]['seconds_per_1000']:.0f}" for kind in ("training", "inference")]
            cells.append(_megabytes(cost["peak_bytes"]))
        lines.append(cells)
    return markdown_table([*titles, "training, s", "inference, s", "memory added"], lines, text_columns=2)


# --------------------------------------------------------------------------------------------------------------------
# Streams


def stream_table(path: Path = RESULTS / "stream-book.json") -> str:
    """Losses by position, and the memory of the longest run and of the one token by token."""
    rows = read_json(path)["rows"]
    compared = [row for row in rows if row["settings"]["tokens"] and row["settings"]["chunk_length"] > 1]
    settings = compared[0]["settings"]
    ranges = [f"{part['from']:,} to {min(part['to'], settings['tokens']):,}" for part in compared[0]["ranges"]]
    lines, losses = [], {}
    for row in compared:
        losses[row["settings"]["attention"], row["settings"]["positions"]] = row["loss"]
        attention = "exact" if row["attention"] == ["softmax"] else ", ".join(f"`{name}`" for name in row["attention"])
        state_bytes = max(line["state_bytes"] for line in row["lines"])
        cells = [f"{part['loss']:.2f}" for part in row["ranges"]]
        lines.append([attention, row["settings"]["positions"], *cells, f"{state_bytes:,}"])
    differences = [
        f"{loss - losses[name, 'restart']:+.2f} with `{name}`"
        for (name, positions), loss in losses.items()
        if positions == "wrap"
    ]
    longest = max(rows, key=lambda row: row["tokens"])
    single = next(row for row in rows if row["settings"]["chunk_length"] == 1)
    return "\n".join(
        [
            f"{settings['model']} reads {settings['text']}, mechanisms after {settings['steps']} steps of attention "
            f"transfer on {settings['train_text']}. Loss per token, in nats, by position in the stream (each a "
            "different part of the text: compare within a column), and bytes of all states:",
            "",
            markdown_table(["attention", "positions", *ranges, "states"], lines, text_columns=2),
            "",
            f"What keeping the state costs against dropping it, in nats per token: {', '.join(differences)}.",
            "",
            f"- {_stream_memory(longest)}",
            f"- {_stream_memory(single)}",
        ]
    )


def _stream_memory(row: Row) -> str:
    settings, growth, lines = row["settings"], row["growth"], row["lines"]
    size = "token by token" if settings["chunk_length"] == 1 else f"in pieces of {settings['chunk_length']}"
    text = "The whole book" if settings["tokens"] is None else "A part of it"
    return (
        f"{text}, `{row['attention'][0]}`, `{settings['positions']}`, {row['tokens']:,} tokens {size}: states of "
        f"{lines[-1]['state_bytes']:,} bytes throughout; resident memory {lines[0]['resident_bytes'] / 2**20:.0f} MiB "
        f"after {lines[0]['tokens']:,} tokens, {growth['resident_bytes'] / 2**20:+.1f} MiB at the end."
    )


# --------------------------------------------------------------------------------------------------------------------
# Fidelity


def fidelity_tables(folder: Path = RESULTS / "fidelity") -> str:
    """One table for each checkpoint: every mechanism before and after attention transfer."""
    return "\n\n".join(_fidelity_table(read_json(path)["rows"]) for path in sorted(folder.glob("*.json")))


def _fidelity_table(rows: Sequence[Row]) -> str:
    first = rows[0]
    decoder, settings = first["kind"] == "decoder", first["settings"]
    text = settings["text"]
    task: Callable[[Row], float] = (
        (lambda quality: quality["perplexity"]["perplexity"])
        if decoder
        else (lambda quality: quality["sentences"]["cosine"])
    )
    columns: list[tuple[str, Callable[[Row], float | None], int]] = [
        ("KL, nats", lambda quality: quality["kl"], 2),
        ("output error", lambda quality: quality["output_error"], 2),
        ("final cosine", lambda quality: quality["final_cosine"], 3),
        ("perplexity" if decoder else "sentence cosine", task, 2 if decoder else 3),
    ]
    lines = [
        [f"`{row['mechanism']}`", *(_before_and_after(row, read, digits) for _, read, digits in columns)]
        for row in sorted(rows, key=lambda row: row["mechanism"])
    ]
    exact = f"; perplexity of the exact model: {first['exact']['perplexity']['perplexity']:.2f}" if decoder else ""
    return (
        f"**{first['model']}** on {text['source']}: {text['fidelity_tokens']:,} held-out tokens in sequences of up to "
        f"{settings['sequence_length']}; transfer: {settings['steps']} steps of {settings['batch_size']} sequences, "
        f"seed {settings['seed']}{exact}.\n\n"
        + markdown_table(["mechanism", *(title for title, _, _ in columns)], lines, text_columns=None)
    )


def _before_and_after(row: Row, read: Callable[[Row], float | None], digits: int) -> str:
    """`0.82→0.21`, or one number where nothing is learned."""
    values = [read(row[stage]) for stage in ("untrained", "trained") if row[stage] is not None]
    if any(value is None for value in values):
        return "–"
    return "→".join(f"{round(value or 0.0, digits) + 0.0:.{digits}f}" for value in values)


# --------------------------------------------------------------------------------------------------------------------
# Packing, profile, compilation, other packages


def packing_summary(path: Path = RESULTS / "packing.json") -> str:
    """What packing saves, in a sentence."""
    results = read_json(path)
    settings, tokens = results["settings"], results["tokens"]
    kinds = {"both": "encoder", "causal": "decoder"}
    speedups = [f"{row['speedup']:.2f}× `{row['attention']}` {kinds[row['direction']]}" for row in results["rows"]]
    return (
        f"`python -m recipes.benchmarks.packing`, {settings['documents']} documents ({results['text']['source']}) in "
        f"batches of {settings['batch_size']}, cut to {settings['max_length']} tokens: {tokens['packed']:,} tokens, "
        f"{tokens['padded']:,} with padding ({tokens['padded'] / tokens['packed']:.2f}×). A forward and backward pass "
        f"of small models on the packed form is faster by {', '.join(speedups)} "
        f"({machine_with_load(results['environment'])}; medians over batches, both forms interleaved)."
    )


def profile_tables(path: Path = RESULTS / "profile.json") -> str:
    """What the torch forms, the native kernels and a decoding step spend their time on."""
    results = read_json(path)
    peaks = results["product_operations_per_second"]
    kinds = list(results["torch_forms"][0]["shares"])
    rates = " and ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    parts = [
        f"{machine_with_load(results['environment'])}; {results['settings']['length']:,} tokens, 12 heads of 64. One "
        f"large matrix product of PyTorch: {rates}.",
        markdown_table(
            ["torch form, float32", "features", "time over products alone", *kinds],
            [
                [
                    f"`{row['mechanism']}`, {row['direction']}",
                    row["features"],
                    f"{row['seconds'] / row['products_seconds']:.1f}",
                    *(f"{100 * row['shares'][kind]:.0f} %" for kind in kinds),
                ]
                for row in results["torch_forms"]
            ],
        ),
    ]
    for dtype, peak in peaks.items():
        titles = [f"native kernel, {dtype}", "multiplications per token and head", "GFLOP/s of all products"]
        rows = [
            [
                f"`{row['mechanism']}`, {row['direction']}",
                f"{row['multiplications_a_token_and_head']:,}",
                f"{row['operations_per_second'] / 1e9:,.0f}",
                f"{100 * row['operations_per_second'] / peak:.0f} %",
                f"{row['torch_seconds'] / row['seconds']:.1f}",
            ]
            for row in results["native_kernels"]
            if row["dtype"] == dtype
        ]
        parts.append(markdown_table([*titles, "of one large product", "times as fast as the torch form"], rows))
    steps = [
        [
            f"`{row['mechanism']}`, {row['features']} features",
            *(f"{1e6 * seconds:.1f}" for seconds in (*row["parts"].values(), row["floor"])),
        ]
        for row in results["steps"]
    ]
    titles = ["decoding step, µs", *results["steps"][0]["parts"], "the state's own update"]
    return "\n\n".join([*parts, markdown_table(titles, steps)])


def compiled_table(path: Path = RESULTS / "compiled.json") -> str:
    """Eager and compiled time of a forward pass and of a token, exact and linear."""
    results = read_json(path)
    length = results["settings"]["length"]
    titles = {"forward": f"forward pass of {length:,} tokens", "token": f"a token after {length:,}"}
    rows = {(row["model"], row["dtype"], row["attention"], row["work"]): row for row in results["rows"]}
    titles = {work: title for work, title in titles.items() if any(key[3] == work for key in rows)}
    lines = []
    for model, dtype, attention in dict.fromkeys(key[:3] for key in rows):
        cells = [model, dtype, f"`{attention}`"]
        for work in titles:
            row = rows.get((model, dtype, attention, work))
            cells += ["", "", ""] if row is None else [
                f"{1e3 * row['eager']['median']:.1f}",
                f"{1e3 * row['compiled']['median']:.1f}",
                f"{row['speedup']['median']:.2f}×",
            ]  # fmt: skip
        lines.append(cells)
    parts = ("eager, ms", "compiled, ms", "eager / compiled")
    columns = [f"{title}, {part}" for title in titles.values() for part in parts]
    table = markdown_table(["model", "dtype", "attention", *columns], lines, text_columns=3)
    return f"{machine_with_load(results['environment'])}; medians.\n\n{table}"


def onnx_table(path: Path = RESULTS / "onnx.json") -> str:
    """Processor time and peak memory of an encoder under ONNX Runtime, by length."""
    results = read_json(path)
    rows = {(row["length"], row["attention"]): row for row in results["rows"]}
    lengths, attentions = (list(dict.fromkeys(column)) for column in zip(*rows, strict=True))
    labels = [name if name == "exact" else f"`{name}`" for name in attentions]
    titles = [f"{label}, {unit}" for unit in ("s", "MB") for label in labels]
    lines = [
        [
            f"{length:,}",
            *(f"{rows[length, name]['seconds']:.2f}" for name in attentions),
            *(f"{rows[length, name]['megabytes']:,.0f}" for name in attentions),
        ]
        for length in lengths
    ]
    return f"{machine_with_load(results['environment'])}.\n\n{markdown_table(['tokens', *titles], lines)}"


def quantization_table(path: Path = RESULTS / "quantization.json") -> str:
    """Size, quality and time of models with int8 weights, beside the same attention in float32."""
    results = read_json(path)
    parts = [machine_with_load(results["environment"]) + "."]
    if any("seconds" in row for row in results["rows"]):
        parts[0] += (
            " Processor time of one thread (medians), in brackets times as fast as the same attention in float32."
        )
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["model"] == model]
        base = {row["attention"]: row.get("seconds") for row in rows if row["scheme"] == "float32"}
        kinds = list(rows[0].get("seconds", ()))
        lines = []
        for row in rows:
            cells = [f"`{row['attention']}`, {row['scheme']}", f"{row['megabytes']:.0f}", f"{row['quality']:.2f}"]
            for kind in kinds:
                seconds, float32 = row["seconds"][kind]["median"], base[row["attention"]][kind]["median"]
                cells.append(f"{1e3 * seconds:.0f} ms ({float32 / seconds:.2f}×)")
            lines.append(cells)
        parts.append(markdown_table([model, "MB", rows[0]["metric"], *kinds], lines))
    return "\n\n".join(parts)


def transfer_loss_table(folder: Path = RESULTS / "transfer-loss") -> str:
    """The perplexity of a converted decoder before and after attention transfer, by the loss of the transfer."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        stages = read_json(path)["stages"]
        cells = [f"{stages[stage]['perplexity']:.2f}" for stage in ("teacher", "patched", "transferred")]
        lines.append([f"`--transfer.loss {path.stem}`", *cells])
    return markdown_table(["loss", "exact", "untrained", "after attention transfer"], lines)


def length_tricks_tables(folder: Path = RESULTS / "length-tricks") -> str:
    """Loss by position and pass keys of each variant, a table for each model: means over seeds."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        results = read_json(path)
        by_variant: dict[str, list[Row]] = {}
        for row in results["rows"]:
            by_variant.setdefault(row["variant"], []).append(row)
        first = results["rows"][0]
        keys = [size for size in first["pass_key"] if any(row["pass_key"][size] for row in results["rows"])]
        lines = []
        for variant, rows in by_variant.items():
            cells = [_loss([row["loss_by_position"][span] for row in rows]) for span in first["loss_by_position"]]
            recalled = (statistics.mean(row["pass_key"][size] for row in rows) for size in keys)
            lines.append([variant, *cells, *(f"{100 * share:.0f} %" for share in recalled)])
        spans = (
            f"loss, {' to '.join(f'{int(end):,}' for end in span.split('-'))}" for span in first["loss_by_position"]
        )
        titles = [results["settings"]["model"], *spans, *(f"pass key, {int(size):,}" for size in keys)]
        parts.append(markdown_table(titles, lines))
    return "\n\n".join(parts)


def _loss(losses: Sequence[float]) -> str:
    text = f"{statistics.mean(losses):.3f}"
    return text if len(losses) == 1 else f"{text} ± {statistics.stdev(losses):.3f}"


def transfer_cost_table(path: Path = RESULTS / "transfer-cost.json") -> str:
    """What a step of attention transfer costs in forward passes, by mechanism and length."""
    results = read_json(path)
    parts = [f"{machine_with_load(results['environment'])}."]
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["model"] == model]
        lengths = sorted({row["length"] for row in rows})
        costs = {(row["attention"], row["length"]): row["forward_passes"]["median"] for row in rows}
        lines = [
            [f"`{name}`", *(f"{costs[name, size]:.2f}" if (name, size) in costs else "–" for size in lengths)]
            for name in dict.fromkeys(row["attention"] for row in rows)
        ]
        parts.append(markdown_table([model, *(f"{length:,} tokens" for length in lengths)], lines))
    return "\n\n".join(parts)
