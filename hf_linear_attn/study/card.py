"""The model card of a conversion, as the Hub expects it, and the tables that the screen shows, too."""

import json
import math
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import CONFIG_NAME

from ..data.task_data import input_columns
from ..data.tasks import TASKS
from ..measure.assessment import assess
from ..measure.metric import is_shown
from ..measure.recall import RETRIEVAL
from ..measure.speed import NOT_MEASURABLE
from ..mechanisms.softmax import EXACT
from ..training.options import TrainingRunConfig
from ..utils.formatting import fixed
from ..utils.options import flatten, to_dict
from ..utils.timing import is_measurable
from ..version import __version__
from .budgets import Budget
from .comparison import Comparison, Quality
from .conversion_result import ConversionResult
from .kinds import kind_of
from .tables import to_markdown

#: A repository: a name, or an owner and a name.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
#: What the folder of a model in the Hub's cache is called, before its owner and name.
CACHED_MODEL = "models--"
#: The models of a run in order, and what the table calls them.
TITLES = {
    "without_attention": "the teacher with its attention switched off",
    "teacher": "exact attention (the teacher)",
    "control": "exact attention, trained as long (the control)",
    "patched": "patched, nothing trained",
    "transferred": "after attention transfer",
    "closed": "with harmful linear parts closed",
    "distilled": "after distillation",
    "converted": "as saved, without what harmed",
    "trained": "after fine-tuning",
}
PAIR_EXAMPLE = '{"text": "The weather is nice today", "text_pair": "It is sunny outside"}'
#: Most digits of a metric.
MAX_DIGITS = 6
#: Options of this run that say nothing of its result.
LOCAL_OPTIONS = ("output", "resume", "overwrite")

USE = """\
```python
from transformers import {auto_class}, AutoTokenizer{pipeline}

import hf_linear_attn as hla

source = "."  # this folder; or its repository on the Hub
model = hla.load_pretrained(source, {auto_class})
tokenizer = AutoTokenizer.from_pretrained(source)
{call}
```

Where the package is installed, `from_pretrained(source, trust_remote_code=True)` of that class gives the same model. \
Without either it must not be used: its weights were trained for linear attention."""


def with_error(metric: str, values: Mapping[str, Any]) -> str:
    """Return a metric as text with its standard error, `0.84 ± 0.02`: two digits, or as many as show the error.

    Without an error as many show two digits of a small value. A cosine of embeddings has four digits: they differ in
    the last ones.
    """
    value, stderr = values[metric], values.get(f"{metric}_stderr")
    least = 4 if metric == "cosine" else 2
    smallest = value / 5 if stderr is None else 2 * stderr
    shown = math.ceil(-math.log10(abs(smallest))) if smallest and math.isfinite(smallest) else least
    digits = min(max(shown, least), MAX_DIGITS)
    return fixed(value, digits) + ("" if stderr is None else f" ± {stderr:.{digits}f}")


def comparison(result: ConversionResult) -> str:
    """Return sentences about the student's metric beside that of the control, if any, else of the teacher.

    Nothing is said where the data cannot measure attention: the teacher must be clearly better than the same answer to
    all rows, or than itself with attention switched off. A share of a metric that is not positive says nothing either.
    """
    score, student, base = result.score, result.final, result.reference
    metric = score.metric
    value, reference = (math.nan if values.get(metric) is None else values[metric] for values in (student, base))
    if not (math.isfinite(value) and math.isfinite(reference)):
        return ""
    if problem := inconclusive(result):
        return problem
    name = "control" if result.scores.control else "teacher"
    assessment = assess(value, reference, None, greater_is_better=score.greater_is_better)
    compared = Comparison(score, Quality(value), Quality(reference), name == "control", assessment)
    if compared.share is None or reference <= 0:
        return ""
    if compared.better:
        texts = [with_error(metric, values) for values in (student, base)]
        sentence = f"The {metric} is better than the {name}'s, {texts[0]} against {texts[1]}."
    elif score.greater_is_better:
        sentence = f"This is {100 * compared.share:.1f} % of the {name}'s {metric}."
    else:
        sentence = f"The {metric} is {100 * (1 / compared.share - 1):.1f} % above the {name}'s."
    if result.scores.distilled and name == "teacher" and not score.is_agreement:  # that of itself is 1, trained or not
        sentence += " The teacher was not trained in the last stage; `--control` trains it as long."
    return sentence


def inconclusive(result: ConversionResult) -> str:
    """Return why the data cannot measure attention; empty if they can."""
    exact_inputs = result.model.beyond_exact
    longest = result.final.get("longest_input")
    if exact_inputs and longest is not None and longest <= exact_inputs["exact_length"]:
        limit = f"No held-out input has more than the {exact_inputs['exact_length']:,} tokens that are exact"
        remedy = "Give longer inputs, or narrow what is exact (--options.window_size or --options.block_size)."
        return f"{limit}, so nothing can be said about linear attention. {remedy}"
    metric, constant = result.score.metric, result.score.constant_answer
    teacher = result.scores.teacher or {}
    without = result.scores.without_attention or {}
    value = teacher.get(metric)
    if value is None or (constant is None and metric not in without):
        return ""
    errors = [values.get(f"{metric}_stderr") for values in (teacher, without or teacher)]
    rows = teacher.get("rows") or 1
    # Of classes, where nothing else is known, the largest standard error of an accuracy.
    unknown = 0.0 if constant is None else (0.25 / rows) ** 0.5
    stderr = math.hypot(*(unknown if error is None else error for error in errors))
    better = result.score.greater_is_better
    options: dict[str, Any] = {"greater_is_better": better, "constant_answer": constant, "stderr": stderr}
    assessment = assess(None, value, without.get(metric), **options)
    if assessment.valid:
        return ""
    if constant is not None and assessment.floor == constant:
        reason = "it has not learned the task, so nothing can be said about attention."
        floor = f"that of {assessment.floor_name} ({constant:.2f})"
        return f"The teacher's {metric} ({value:.2f}) is not clearly better than {floor}: {reason}"
    texts = [with_error(metric, values) for values in (teacher, without)]
    return (
        f"These data cannot measure attention: the teacher's {metric} ({texts[0]}) is not clearly better than with its "
        f"attention switched off ({texts[1]}). Give longer texts, or those that the model was made for."
    )


def results_table(result: ConversionResult) -> list[str]:
    """Return the metric of the models of a run as lines of a Markdown table."""
    stages: list[tuple[str, Mapping[str, Any]]] = []
    scores = vars(result.scores)
    for name, title in TITLES.items():
        values = scores[name]
        if values and not (name == "converted" and stages and values == stages[-1][1]):
            stages.append((title, values))
    names = dict.fromkeys(filter(is_shown, chain.from_iterable(values for _, values in stages)))
    if not names:
        return []
    rows = []
    for title, values in stages:
        known = [name for name in names if values.get(name) is not None]
        rows.append({"": title, **{name: with_error(name, values) for name in known}})
    sentence = comparison(result)
    return markdown_lines(rows, ["", *names]) + (["", sentence] if sentence else [])


def budget_lines(result: ConversionResult) -> list[str]:
    """Return what was chosen for a budget and why, and whether the model as saved is within it, where measured."""
    text = result.config.get("budget")
    if not text or result.choice is None:
        return []
    budget = Budget.parse(text)
    lines = [f"For {text}: {result.choice.reason}."]
    value, measured = met_by(budget, result)
    if measured:
        relation = "within" if budget.is_met(value) else "beyond"
        lines += ["", f"As saved: {measured}, which is {relation} the budget."]
    elif budget.cost == "speedup":
        timed = result.speed.at(budget.length) if result.speed else None
        state = "not known" if timed is None else NOT_MEASURABLE
        problem = f"The speed of the saved model at {budget.length:,} tokens is {state}"
        lines += ["", f"{problem}: nothing says whether it is within the budget."]
    return lines


def met_by(budget: Budget, result: ConversionResult) -> tuple[float | None, str]:
    """Return what the model as saved has of what a budget limits, as a number and as text; None and "" if unknown."""
    value = None
    if budget.cost == "speedup":
        timed = result.speed.at(budget.length) if result.speed else None
        if timed is not None and is_measurable(timed["speedup_p20"], timed["speedup_p80"]):
            return timed["speedup"], f"{timed['speedup']:.2f}x"
    elif budget.unit is not None and budget.unit.name == "recall":
        if result.recall is not None:
            value = budget.unit.damage(result.recall.teacher, result.recall.student)
    elif budget.unit is not None and result.scores.teacher and result.final:
        value = budget.unit.damage(result.scores.teacher, result.final, result.score.metric)
    return value, "" if value is None or budget.unit is None else budget.unit.format(value)


def recall_table(result: ConversionResult) -> list[str]:
    """Return what teacher and model recall, with 95 % intervals, as lines of a Markdown table."""
    recall = result.recall
    if recall is None:
        return []
    question = "the document of a sentence" if recall.task == RETRIEVAL else "one of four keys in prose"
    rows = []
    for name, values in (("teacher", recall.teacher), ("this model", recall.student)):
        row = {f"recall: {question}": name, "tokens": f"{recall.length:,}", "prompts": values["rows"]}
        row["score"] = f"{values['recall']:.2f}"
        rows.append({**row, "95 % interval": f"{values['low']:.2f} to {values['high']:.2f}"})
    return markdown_lines(rows)


def markdown_lines(rows: list[dict[str, Any]], columns: list[str] | None = None, text_columns: int = 1) -> list[str]:
    """Return the lines of a Markdown table with a row for each mapping of titles to cells."""
    return to_markdown(pd.DataFrame(rows, columns=columns), text_columns=text_columns).splitlines()


def exactness(counts: Mapping[str, Any]) -> str:
    """Return a sentence about the inputs that the mechanism attends to exactly."""
    longer = f"of {counts['inputs']:,} training inputs {counts['longer']:,} are longer"
    return f"Inputs of up to {counts['exact_length']:,} tokens are attended to exactly; {longer}."


def speed_table(result: ConversionResult) -> list[str]:
    """Return times of one forward pass beside the teacher's, as lines of a Markdown table.

    A ratio that varies more than it differs from 1 says nothing (see `utils.timing.is_measurable`).
    """
    speed = result.speed
    if speed is None or not speed.lengths:
        return []
    rows = []
    for length, exact, linear in zip(speed.lengths, speed.teacher, speed.student, strict=True):
        ratio = linear["speedup"]
        low, high = linear["speedup_p20"], linear["speedup_p80"]
        text = f"{ratio:.2f}" if is_measurable(low, high) else NOT_MEASURABLE
        row = {"tokens": f"{length:,}"}
        row |= {
            name: f"{1e3 * times['seconds']:.1f} ms" for name, times in (("teacher", exact), ("this model", linear))
        }
        rows.append({**row, "times as fast (p20 to p80)": f"{text} ({low:.2f} to {high:.2f})"})
    lines = markdown_lines(rows, text_columns=0)
    limit = speed.longest_input
    if limit is not None and max(speed.lengths) > limit:
        reach = f"The model was made for inputs of up to {limit:,} tokens. Of longer ones only the times are known"
        lines += ["", f"{reach}: nothing is said about what it answers to them."]
    return lines


def result_lines(result: ConversionResult) -> list[str]:
    """Return what the screen shows at the end of a run."""
    lines = []
    for table in (budget_lines(result), results_table(result), recall_table(result), speed_table(result)):
        lines += [*table, ""] if table else []
    return lines


def changed_options(options: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the default, as a YAML file for `--config` has them; of local paths the name.

    What names folders of this run is left out.
    """
    changed: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            value = changed_options(value, default.get(name) or {})
        if value != default.get(name) and value != {} and name not in LOCAL_OPTIONS:
            changed[name] = public(value)
    return changed


def layers_table(result: ConversionResult) -> list[str]:
    """Return the linear layers, and what the linear part of each is worth: the loss without it, minus that with it."""
    parts = {part["layer"]: part for part in result.linear_parts or ()}
    rows = []
    for layer in result.model.layers:
        heads = "all" if layer["attention"] == EXACT else ", ".join(map(str, layer["exact_heads"]))
        row = {"layer": layer["index"], "attention": layer["attention"], "exact heads": heads or None}
        row |= {"learned parameters": f"{layer['parameters']:,}", "bytes of state": f"{layer['state_bytes']:,}"}
        if parts:
            part = parts.get(layer["index"])
            row["worth of the linear part"] = _worth(part) if part else ""
        rows.append(row)
    return markdown_lines(rows, text_columns=3) if rows else []


def _worth(part: Mapping[str, Any]) -> str:
    """Return what a linear part is worth, such as `+0.0123 ± 0.0010` or `-0.5000, closed`."""
    error = "" if part.get("stderr") is None else f" ± {part['stderr']:.4f}"
    return f"{part['worth']:+z.4f}{error}{'' if part['kept'] else ', closed'}"


def model_card(config: TrainingRunConfig, result: ConversionResult) -> str:
    """Return the card as Markdown with its YAML header."""
    source = public(config.model or config.model_type or "")
    name = model_name(config.model) if config.model else source
    data = public(config.data.task or config.data.dataset or "")
    mechanisms = sorted({layer["attention"] for layer in result.model.layers})
    versions = ", ".join(f"{name} {version}" for name, version in result.environment["versions"].items())
    numbers = ", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in result.data.items())
    quality, speed = results_table(result), speed_table(result)
    if quality and result.model.beyond_exact:
        skipped = (result.training.transfer or {}).get("skipped", "")
        quality += ["", f"{exactness(result.model.beyond_exact)} {skipped}".rstrip()]
    if quality and "±" in "".join(quality):
        quality += ["", "± is the standard error over the validation rows."]
    if speed:
        hardware = result.environment["hardware"]
        where = f"{hardware.get('device')} ({hardware.get('cpu')})"
        speed = [f"One forward pass, batch 1, medians, side by side on {where}.", "", *speed]
    kind = kind_of(config)
    is_pair = kind.task_type == "classification" and len(input_columns(config.data)) == 2
    text = PAIR_EXAMPLE if is_pair else kind.example
    use = USE.format(auto_class=kind.auto_class, call=kind.call(text), pipeline=", pipeline" if kind.pipeline else "")
    settings = yaml.safe_dump(
        changed_options(to_dict(config), to_dict(type(config)().completed("classification"))),
        sort_keys=False,
        allow_unicode=True,
    )
    note = "Options that are not the default; `results.json` of the run has all."
    sections = {
        "Use": [use] if mechanisms else [],
        "Budget": budget_lines(result),
        "Quality": quality,
        "Recall": recall_table(result),
        "Speed": speed,
        "Settings": [note, "", f"```yaml\n{settings}```"],
        "Layers": layers_table(result),
        "Data and versions": [f"{numbers}. {versions}. {result.processes} process(es)."],
    }
    origin = "random weights of " if config.from_config or config.model_type is not None else ""
    parts = [
        f"---\n{_header(config, result, mechanisms).to_yaml()}\n---",
        f"# {name.rpartition('/')[2]} with {', '.join(mechanisms) or 'exact'} attention",
        f"Made with hf-linear-attn {__version__} from {origin}`{source}` on `{data}`.",
        *("\n".join([f"## {title}", "", *lines]) for title, lines in sections.items() if lines),
    ]
    return "\n\n".join(parts) + "\n"


def _header(config: TrainingRunConfig, result: ConversionResult, mechanisms: list[str]) -> ModelCardData:
    """Return what the Hub reads. It refuses names of models and data sets that are none of its own."""
    repository = TASKS.get(config.data.task).hub[0] if config.data.task else config.data.dataset
    pipeline_tag = kind_of(config).pipeline_tag
    results = [
        EvalResult(
            task_type=pipeline_tag,
            dataset_type=str(repository) if _on_hub(repository) else "private",
            dataset_name=public(config.data.task or config.data.dataset or "private"),
            metric_type=name,
            metric_value=value,
        )
        for name, value in result.final.items()
        if is_shown(name) and isinstance(value, (int, float)) and math.isfinite(value)
    ]
    name = (model_name(config.model) if config.model else config.model_type) or "model"
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=["hf-linear-attn", *(["linear-attention"] if mechanisms else [])],
        base_model=_base_model(config.model),
        license=_license(config.model),
        datasets=[str(repository)] if _on_hub(repository) else None,
        metrics=[result.score.metric] if result.final else None,
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
        ignore_metadata_errors=True,
    )


def _license(source: str | None) -> str | None:
    """Return the license that the card of the base names; None if there is no card at hand."""
    license = _card_fields(source).get("license")
    return license if isinstance(license, str) else None


def model_name(source: str) -> str:
    """Return the name of a model; of a folder, which may be called anything, the one that something in it says.

    That is its card, by its own name or that of its base, else its place in the Hub's cache, else the class in its
    config. The folder's own name is the last resort.
    """
    folder = Path(source).absolute()
    if not folder.is_dir():
        return public(source)
    results = _card_fields(source).get("model-index") or []
    cached = [part for part in folder.parts if part.startswith(CACHED_MODEL)]
    names = (
        *(result["name"] for result in results),
        _base_model(source),
        *(part.removeprefix(CACHED_MODEL).replace("--", "/") for part in cached),
        _class_name(folder),
        folder.name,
    )
    return next(name for name in names if name)


def _class_name(folder: Path) -> str:
    """Return the class of the model in a folder; empty where its config does not say."""
    try:
        classes = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError):
        return ""
    return str(classes[0]) if classes else ""


def _base_model(source: str | None) -> str | None:
    """Return the repository that a model comes from: itself, or that which the card of a folder names; else None."""
    base = source if _on_hub(source) else _card_fields(source).get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    return base if isinstance(base, str) and _on_hub(base) else None


def _card_fields(source: str | None) -> dict[str, Any]:
    """Return the header of a model's card; empty if there is no card at hand, or one that cannot be read."""
    if source is None or not (Path(source).is_dir() or _on_hub(source)):
        return {}
    path = Path(source) / "README.md"
    if Path(source).is_dir() and not path.is_file():
        return {}
    try:
        card = ModelCard.load(str(path) if path.is_file() else source, ignore_metadata_errors=True)
    except (OSError, ValueError, yaml.YAMLError):  # no network, no card, or one that cannot be read
        return {}
    return card.data.to_dict()


def public_options(config: TrainingRunConfig) -> dict[str, Any]:
    """Return all options of a run by their dotted names, of local paths the last part only."""
    return {name: public(value) for name, value in flatten(to_dict(config)).items()}


def _on_hub(name: str | None) -> bool:
    """Whether a source looks like a repository, and is nothing on this disk."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def public(value: Any) -> Any:
    """A path out of the working folder, without its folders: they are nobody else's business, and no use to them."""
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    local = isinstance(value, str) and (value.startswith(("~", "..")) or Path(value).is_absolute())
    return Path(value).name if local else value
