"""The model card of a conversion: how to load it, what it cost, with which settings, on which data."""

from __future__ import annotations

import json
from typing import Any

from ..version import __version__
from .options import ConvertSettings, FinetuneSettings
from .settings import flat

#: Stages with metrics, in order, and what the table calls them.
STAGES = (
    ("teacher", "exact attention (the teacher)"),
    ("patched", "patched, nothing trained"),
    ("transferred", "after attention transfer"),
    ("distilled", "after distillation"),
    ("trained", "after fine-tuning"),
)


def metric_rows(state: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Title and metrics of every finished stage that has some."""
    return [(title, state[stage]) for stage, title in STAGES if state.get(stage)]


def recovered(facts: dict[str, Any], state: dict[str, Any]) -> float | None:
    """Student over teacher in the metric that decides (its inverse where lower is better); None without both."""
    goal, teacher, student = facts["goal"], state.get("teacher"), state.get("distilled") or state.get("transferred")
    if not teacher or not student:
        return None
    old, new = teacher[goal["metric"]], student[goal["metric"]]
    if not old or not new:
        return None
    return new / old if goal["higher_is_better"] else old / new


def results_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The stages' metrics as lines of a Markdown table."""
    rows = metric_rows(state)
    if not rows:
        return []
    names = list(rows[0][1])
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for title, metrics in rows:
        cells = [f"{metrics[name]:.4f}" if name in metrics else "–" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    share = recovered(facts, state)
    if share is not None:
        lines += ["", f"Recovered: {100 * share:.1f} % of the teacher's {facts['goal']['metric']}."]
    return lines


def speed_table(state: dict[str, Any]) -> list[str]:
    """Times of one forward pass beside the teacher's, as lines of a Markdown table."""
    speed = state.get("speed")
    if not speed or not speed.get("lengths"):
        return []
    lines = ["| tokens | teacher | this model | times as fast |", "| ---: | ---: | ---: | ---: |"]
    for place, length in enumerate(speed["lengths"]):
        old, new = speed["rows"]["teacher"][place], speed["rows"]["student"][place]
        lines.append(
            f"| {length:,} | {1e3 * old['median']:.1f} ms | {1e3 * new['median']:.1f} ms | {new['speedup']:.2f} |"
        )
    return lines


def model_card(settings: FinetuneSettings | ConvertSettings, facts: dict[str, Any], state: dict[str, Any]) -> str:
    """The card as Markdown with its YAML header."""
    source = settings.model.source or ""
    data = settings.data.task or settings.data.source or ""
    linear = bool(facts["layers"])
    kinds = sorted({layer["attention"] for layer in facts["layers"]})
    parts = [
        _header(settings, source, data, linear),
        f"# {source.rstrip('/').rpartition('/')[2]} with {', '.join(kinds) if linear else 'exact'} attention",
        "",
        f"Made with hf-linear-attn {__version__} from `{source}` on `{data}`.",
        "",
        *_loading(facts, linear),
        *_section("Quality", results_table(facts, state)),
        *_section("Speed", _speed_section(facts, state)),
        *_section("Layers", _layers(facts)),
        *_section("Settings", ["```json", json.dumps(flat(settings), indent=1, ensure_ascii=False), "```"]),
        *_section("Data and versions", _versions(facts)),
    ]
    return "\n".join(parts) + "\n"


def _header(settings: FinetuneSettings | ConvertSettings, source: str, data: str, linear: bool) -> str:
    tags = ["hf-linear-attn", *(["linear-attention"] if linear else [])]
    lines = ["---", "library_name: transformers", f"tags: {json.dumps(tags)}", f"base_model: {json.dumps(source)}"]
    return "\n".join([*lines, f"datasets: {json.dumps([data])}", "---", ""])


def _loading(facts: dict[str, Any], linear: bool) -> list[str]:
    if not linear:
        return []
    return [
        "```python",
        "import hf_linear_attn as hla",
        "",
        'model = hla.load_pretrained("this folder or repository")',
        "```",
        "",
        "Where the package is installed, `AutoModel….from_pretrained(…, trust_remote_code=True)` gives the same model. "
        "Without either it must not be used: its weights were trained for linear attention.",
        "",
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def _speed_section(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    table = speed_table(state)
    if not table:
        return []
    where = facts["environment"]["hardware"]
    return [
        f"One forward pass, batch 1, medians, side by side on {where.get('device')} ({where.get('cpu')}).",
        "",
        *table,
    ]


def _layers(facts: dict[str, Any]) -> list[str]:
    if not facts["layers"]:
        return []
    lines = ["| layer | attention | learned parameters | state bytes |", "| ---: | --- | ---: | ---: |"]
    for layer in facts["layers"]:
        lines.append(
            f"| {layer['index']} | {layer['attention']} | {layer['parameters']:,} | {layer['state_bytes']:,} |"
        )
    return lines


def _versions(facts: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts["environment"]["versions"].items())
    data = ", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in facts["data"].items())
    return [f"{data}. {versions}. {facts['processes']} process(es)."]
