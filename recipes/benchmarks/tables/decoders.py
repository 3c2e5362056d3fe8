"""Tables of converted decoders: what is outside of windows, budgets, other ways to a smaller cache, length."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from hf_linear_attn.study.tables import EMPTY, to_markdown
from hf_linear_attn.utils.timing import is_measurable

from ... import rivals, smollm2
from ...result_files import RESULTS, read_json
from .text import Results


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


def transfer_loss_table() -> str:
    """The perplexity of a converted decoder before and after attention transfer, by the loss of the transfer."""
    titles = {"teacher": "exact", "patched": "untrained", "transferred": "after attention transfer"}
    lines = []
    for path in sorted((RESULTS / "transfer-loss").glob("*.json")):
        scores = read_json(path)["scores"]
        cells = {title: f"{scores[name]['perplexity']:.2f}" for name, title in titles.items()}
        lines.append({"loss": f"`--transfer.loss {path.stem}`", **cells})
    return to_markdown(pd.DataFrame(lines))


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
SMOLLM2_FOLDERS = {
    "smollm2-calibrated": "calibrated",
    "smollm2-seed-0": "trained, seed 0",
    "smollm2-seed-1": "trained, seed 1",
}


def smollm2_table() -> str:
    """Committed conversions of SmolLM2: a row for each variant, what it is at 2,048 and 8,192 tokens."""
    measured: dict[str, Any] = {}
    for folder, kind in SMOLLM2_FOLDERS.items():
        results = read_json(f"{folder}/results.json")
        for name in (smollm2.EXACT, *smollm2.VARIANTS):
            label = name if name == smollm2.EXACT else f"{name}, {kind}"
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
