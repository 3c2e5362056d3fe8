"""The model card of a conversion: how to load it, what it cost, with which settings, on which data."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..data.tasks import TASKS
from ..utils.arguments import flatten, to_dict
from ..version import __version__
from .options import TrainingRunConfig

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
    """Return the student's share of the teacher's metric that decides (its inverse where lower is better).

    None where the share says nothing: without both metrics, for NaN, for a teacher that is no better than chance (a
    correlation of 0 or less), or for a loss of 0.
    """
    goal, student_metrics = facts["goal"], state.get("distilled") or state.get("transferred")
    teacher, student = (
        (metrics or {}).get(goal["metric"], math.nan) for metrics in (state.get("teacher"), student_metrics)
    )
    teacher, student = (math.nan if value is None else value for value in (teacher, student))
    denominator, numerator = (teacher, student) if goal["greater_is_better"] else (student, teacher)
    if not (math.isfinite(denominator) and math.isfinite(numerator)) or denominator <= 0:
        return None
    return numerator / denominator


def results_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The stages' metrics as lines of a Markdown table."""
    rows = metric_rows(state)
    if not rows:
        return []
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for title, metrics in rows:
        values = [metrics.get(name) for name in names]
        cells = ["–" if value is None else f"{value:.4f}" for value in values]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    share = recovered(facts, state)
    if share is not None:
        lines += ["", f"Recovered: {100 * share:.1f} % of the teacher's {facts['goal']['metric']}."]
    return lines


def exactness(counts: dict[str, int]) -> str:
    """Return a sentence about the inputs that the mechanism attends to exactly."""
    return (
        f"Inputs of up to {counts['exact_length']:,} tokens are attended to exactly; of {counts['inputs']:,} training "
        f"inputs {counts['longer']:,} are longer."
    )


def _quality_section(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    table = results_table(facts, state)
    counts = facts.get("beyond_exact")
    if not table or not counts:
        return table
    skipped = state.get("transfer", {}).get("skipped", "")
    return [*table, "", f"{exactness(counts)} {skipped}".rstrip()]


def speed_table(state: dict[str, Any]) -> list[str]:
    """Times of one forward pass beside the teacher's, as lines of a Markdown table."""
    speed = state.get("speed")
    if not speed or not speed.get("lengths"):
        return []
    lines = ["| tokens | teacher | this model | times as fast |", "| ---: | ---: | ---: | ---: |"]
    for index, length in enumerate(speed["lengths"]):
        old, new = speed["rows"]["teacher"][index], speed["rows"]["student"][index]
        lines.append(
            f"| {length:,} | {1e3 * old['median']:.1f} ms | {1e3 * new['median']:.1f} ms | {new['speedup']:.2f} |"
        )
    return lines


def model_card(config: TrainingRunConfig, facts: dict[str, Any], state: dict[str, Any]) -> str:
    """The card as Markdown with its YAML header."""
    source, data = _public(config.model or ""), _public(config.data.task or config.data.dataset or "")
    linear = bool(facts["layers"])
    options = {name: _public(value) for name, value in flatten(to_dict(config)).items()}
    kinds = sorted({layer["attention"] for layer in facts["layers"]})
    parts = [
        _header(config, linear),
        f"# {source.rpartition('/')[2]} with {', '.join(kinds) if linear else 'exact'} attention",
        "",
        f"Made with hf-linear-attn {__version__} from `{source}` on `{data}`.",
        "",
        *_loading(facts, linear),
        *_section("Quality", _quality_section(facts, state)),
        *_section("Speed", _speed_section(facts, state)),
        *_section("Layers", _layers(facts)),
        *_section("Options", ["```json", json.dumps(options, indent=1, ensure_ascii=False), "```"]),
        *_section("Data and versions", _versions(facts)),
    ]
    return "\n".join(parts) + "\n"


def _header(config: TrainingRunConfig, linear: bool) -> str:
    """What the Hub reads. It refuses names of models and data sets that are none of its own."""
    tags = ["hf-linear-attn", *(["linear-attention"] if linear else [])]
    lines = ["---", "library_name: transformers", f"tags: {json.dumps(tags)}"]
    if _on_hub(config.model):
        lines.append(f"base_model: {json.dumps(config.model)}")
    data = TASKS.get(config.data.task).hub[0] if config.data.task else config.data.dataset
    if _on_hub(data):
        lines.append(f"datasets: {json.dumps([data])}")
    return "\n".join([*lines, "---", ""])


def _on_hub(name: str | None) -> bool:
    """Whether a source looks like a repository, and is nothing on this disk."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _public(value: Any) -> Any:
    """A path from the root of the disk without its folders: they are nobody else's business, and no use to them."""
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
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
    hardware = facts["environment"]["hardware"]
    return [
        f"One forward pass, batch 1, medians, side by side on {hardware.get('device')} ({hardware.get('cpu')}).",
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
