"""The model card of a conversion: how to load it, what it cost, with which settings, on which data."""

import json
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..data.tasks import TASKS
from ..utils.options import flatten, to_dict
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

#: How to load a patched checkpoint.
LOADING = """```python
import hf_linear_attn as hla

model = hla.load_pretrained("this folder or repository")
```

Where the package is installed, `AutoModel….from_pretrained(…, trust_remote_code=True)` gives the same model. Without \
either it must not be used: its weights were trained for linear attention."""


def comparison_with_teacher(facts: dict[str, Any], state: dict[str, Any]) -> str:
    """Return a sentence about the student's metric beside its teacher's; empty where there is nothing to compare.

    A share of the teacher's metric (its inverse where lower is better) says nothing where the teacher has not learned
    the task, and is no measure of what linear attention costs where the student has been trained longer.
    """
    metric, higher = facts["goal"]["metric"], facts["goal"]["greater_is_better"]
    if "cosine" in (state.get("teacher") or ()):  # of embeddings, whose loss is 1 - cosine
        metric, higher = "cosine", True
    stages = (state.get("teacher"), state.get("distilled") or state.get("transferred"))
    values = [(metrics or {}).get(metric) for metrics in stages]
    teacher, student = (math.nan if value is None else value for value in values)
    if not (math.isfinite(teacher) and math.isfinite(student)):
        return ""
    floor = facts.get("most_frequent_answer")
    rows = sum(count for name, count in facts["data"].items() if name.startswith("valid") and name.endswith("_rows"))
    if floor is not None and teacher - floor <= 2 * (0.25 / rows) ** 0.5:  # two standard errors
        constant = f"that of always giving the most frequent answer ({floor:.4f})"
        reason = "it has not learned the task, so nothing can be said about attention."
        return f"The teacher's {metric} ({teacher:.4f}) is not clearly better than {constant}: {reason}"
    denominator, numerator = (teacher, student) if higher else (student, teacher)
    if denominator <= 0:
        return ""
    if numerator > denominator:
        sentence = f"The {metric} is better than the teacher's, {student:.4f} against {teacher:.4f}."
    else:
        sentence = f"This is {100 * numerator / denominator:.1f} % of the teacher's {metric}."
    if state.get("distilled"):
        sentence += " The teacher was not trained in the last stage; `--control` trains the exact model as long."
    return sentence


def results_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The stages' metrics as lines of a Markdown table."""
    stages = [(title, state[stage]) for stage, title in STAGES if state.get(stage)]
    if not stages:
        return []
    names = list(dict.fromkeys(name for _, values in stages for name in values))
    rows = [[title, *(f"{values[name]:.4f}" if name in values else "–" for name in names)] for title, values in stages]
    sentence = comparison_with_teacher(facts, state)
    return _table(["", *names], rows, numbers=len(names)) + (["", sentence] if sentence else [])


def _table(titles: list[str], rows: list[list[str]], numbers: int) -> list[str]:
    """Lines of a Markdown table whose last columns, as many as `numbers`, are aligned on the right."""
    alignment = ["---"] * (len(titles) - numbers) + ["---:"] * numbers
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (titles, alignment, *rows)]


def exactness(counts: dict[str, int]) -> str:
    """Return a sentence about the inputs that the mechanism attends to exactly."""
    longer = f"of {counts['inputs']:,} training inputs {counts['longer']:,} are longer"
    return f"Inputs of up to {counts['exact_length']:,} tokens are attended to exactly; {longer}."


def speed_table(state: dict[str, Any]) -> list[str]:
    """Times of one forward pass beside the teacher's, as lines of a Markdown table."""
    speed = state.get("speed") or {}
    if not speed.get("lengths"):
        return []
    rows = [
        [f"{length:,}", f"{1e3 * old['median']:.1f} ms", f"{1e3 * new['median']:.1f} ms", f"{new['speedup']:.2f}"]
        for length, old, new in zip(speed["lengths"], speed["rows"]["teacher"], speed["rows"]["student"], strict=True)
    ]
    return _table(["tokens", "teacher", "this model", "times as fast"], rows, numbers=4)


def model_card(config: TrainingRunConfig, facts: dict[str, Any], state: dict[str, Any]) -> str:
    """The card as Markdown with its YAML header."""
    source, data = _public(config.model or ""), _public(config.data.task or config.data.dataset or "")
    kinds = sorted({layer["attention"] for layer in facts["layers"]})
    versions = ", ".join(f"{name} {version}" for name, version in facts["environment"]["versions"].items())
    numbers = ", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in facts["data"].items())
    hardware = facts["environment"]["hardware"]
    quality, speed = results_table(facts, state), speed_table(state)
    if quality and facts.get("beyond_exact"):
        skipped = state.get("transfer", {}).get("skipped", "")
        quality += ["", f"{exactness(facts['beyond_exact'])} {skipped}".rstrip()]
    if speed:
        where = f"{hardware.get('device')} ({hardware.get('cpu')})"
        speed = [f"One forward pass, batch 1, medians, side by side on {where}.", "", *speed]
    titles = ["layer", "attention", "learned parameters", "state bytes"]
    layers = [
        [str(layer["index"]), layer["attention"], f"{layer['parameters']:,}", f"{layer['state_bytes']:,}"]
        for layer in facts["layers"]
    ]
    sections = {
        "Quality": quality,
        "Speed": speed,
        "Layers": _table(titles, layers, numbers=2) if layers else [],
        "Options": ["```json", json.dumps(public_options(config), indent=1, ensure_ascii=False), "```"],
        "Data and versions": [f"{numbers}. {versions}. {facts['processes']} process(es)."],
    }
    # The Hub refuses names of models and data sets that are none of its own.
    repository = TASKS.get(config.data.task).hub[0] if config.data.task else config.data.dataset
    header = ModelCardData(
        library_name="transformers",
        tags=["hf-linear-attn", *(["linear-attention"] if kinds else [])],
        base_model=config.model if _on_hub(config.model) else None,
        datasets=[str(repository)] if _on_hub(repository) else None,
    )
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {source.rpartition('/')[2]} with {', '.join(kinds) or 'exact'} attention",
        f"Made with hf-linear-attn {__version__} from `{source}` on `{data}`.",
        *([LOADING] if kinds else []),
        *("\n".join([f"## {title}", "", *lines]) for title, lines in sections.items() if lines),
    ]
    return "\n\n".join(parts) + "\n"


def public_options(config: TrainingRunConfig) -> dict[str, Any]:
    """Return all options of a run by their dotted names, of local paths the last part only."""
    return {name: _public(value) for name, value in flatten(to_dict(config)).items()}


def _on_hub(name: str | None) -> bool:
    """Whether a source looks like a repository, and is nothing on this disk."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _public(value: Any) -> Any:
    """A path out of the working folder, without its folders: they are nobody else's business, and no use to them."""
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
    local = isinstance(value, str) and (value.startswith(("~", "..")) or Path(value).is_absolute())
    return Path(value).name if local else value
