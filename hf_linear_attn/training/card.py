"""The model card of a conversion: how to load it, what it cost, with which settings, on which data."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..data.tasks import get_task
from ..version import __version__
from .options import ConvertSettings, FinetuneSettings
from .settings import flat

#: A repository: a name, or an owner and a name.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
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
    """Student over teacher in the metric that decides (its inverse where lower is better).

    None where that says nothing: without both, for what is no number, over a teacher that is no better than chance (a
    correlation of 0 or less), or for a loss of 0.
    """
    goal, teacher, student = facts["goal"], state.get("teacher"), state.get("distilled") or state.get("transferred")
    old, new = ((metrics or {}).get(goal["metric"], math.nan) for metrics in (teacher, student))
    whole, part = (old, new) if goal["higher_is_better"] else (new, old)
    if not (math.isfinite(whole) and math.isfinite(part)) or whole <= 0:
        return None
    return part / whole


def results_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The stages' metrics as lines of a Markdown table."""
    rows = metric_rows(state)
    if not rows:
        return []
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for title, metrics in rows:
        cells = [f"{metrics[name]:.4f}" if name in metrics else "–" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    share = recovered(facts, state)
    if share is not None:
        lines += ["", f"Recovered: {100 * share:.1f} % of the teacher's {facts['goal']['metric']}."]
    return lines


def exactness(found: dict[str, int]) -> str:
    """A sentence on the inputs that the mechanism attends to exactly."""
    return (
        f"Inputs of up to {found['exact_length']:,} tokens are attended to exactly; of {found['inputs']:,} training "
        f"inputs {found['longer']:,} are longer."
    )


def _quality_section(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    table = results_table(facts, state)
    found = facts.get("beyond_exact")
    return [*table, "", exactness(found)] if table and found else table


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
    source, data = _public(settings.model.source or ""), _public(settings.data.task or settings.data.source or "")
    linear = bool(facts["layers"])
    shown = {name: _public(value) for name, value in flat(settings).items()}
    kinds = sorted({layer["attention"] for layer in facts["layers"]})
    parts = [
        _header(settings, linear),
        f"# {source.rpartition('/')[2]} with {', '.join(kinds) if linear else 'exact'} attention",
        "",
        f"Made with hf-linear-attn {__version__} from `{source}` on `{data}`.",
        "",
        *_loading(facts, linear),
        *_section("Quality", _quality_section(facts, state)),
        *_section("Speed", _speed_section(facts, state)),
        *_section("Layers", _layers(facts)),
        *_section("Settings", ["```json", json.dumps(shown, indent=1, ensure_ascii=False), "```"]),
        *_section("Data and versions", _versions(facts)),
    ]
    return "\n".join(parts) + "\n"


def _header(settings: FinetuneSettings | ConvertSettings, linear: bool) -> str:
    """What the Hub reads. It refuses names of models and data sets that are none of its own."""
    tags = ["hf-linear-attn", *(["linear-attention"] if linear else [])]
    lines = ["---", "library_name: transformers", f"tags: {json.dumps(tags)}"]
    if _on_hub(settings.model.source):
        lines.append(f"base_model: {json.dumps(settings.model.source)}")
    data = get_task(settings.data.task).hub[0] if settings.data.task else settings.data.source
    if _on_hub(data):
        lines.append(f"datasets: {json.dumps([data])}")
    return "\n".join([*lines, "---", ""])


def _on_hub(name: str | None) -> bool:
    """Whether a source looks like a repository, and is nothing on this disk."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _public(value: Any) -> Any:
    """A path from the root of the disk without its folders: they are nobody else's business, and no use to them."""
    if isinstance(value, (list, tuple)):
        return [_public(held) for held in value]
    local = isinstance(value, str) and (value.startswith("~") or Path(value).is_absolute())
    return Path(value).name if local else value


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
