"""The model card of a conversion, as the Hub expects it, and the tables that the screen shows, too."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import CONFIG_NAME

from ..data.task_data import AUTO_CLASSES
from ..data.tasks import TASKS
from ..measure.quality import Score, assess
from ..measure.speed import NOT_MEASURABLE
from ..mechanisms.softmax import EXACT
from ..training.options import TrainingRunConfig
from ..utils.formatting import fixed
from ..utils.options import flatten, to_dict
from ..utils.timing import is_measurable
from ..version import __version__
from .budgets import Budget, scored
from .comparison import Comparison, Quality

#: A repository: a name, or an owner and a name.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
#: What the folder of a model in the Hub's cache is called, before its owner and name.
CACHED_MODEL = "models--"
#: Stages with metrics, in order, and what the table calls them.
STAGES = (
    ("no attention", "the teacher with its attention switched off"),
    ("teacher", "exact attention (the teacher)"),
    ("control", "exact attention, trained as long (the control)"),
    ("patched", "patched, nothing trained"),
    ("transferred", "after attention transfer"),
    ("closed", "with harmful linear parts closed"),
    ("distilled", "after distillation"),
    ("converted", "as saved, without what harmed"),
    ("trained", "after fine-tuning"),
)
EXAMPLE = '"The weather is nice today"'
PAIR_EXAMPLE = '{"text": "The weather is nice today", "text_pair": "It is sunny outside"}'
#: What the Hub calls a kind of model, the pipeline that loads it, and its arguments in the example.
PIPELINES = {
    "classification": ("text-classification", "text-classification", EXAMPLE),
    "causal-lm": ("text-generation", "text-generation", f"{EXAMPLE}, max_new_tokens=8"),
    "masked-lm": ("fill-mask", "fill-mask", 'f"The weather is {tokenizer.mask_token} today"'),
    "embedding": ("sentence-similarity", "feature-extraction", f"{EXAMPLE}, return_tensors=True"),
}
#: What recall asks for.
RECALL_TITLES = {"niah_multikey_1": "one of four keys in prose", "retrieval": "the document of a sentence"}
#: Metrics that are correlations; the Matthews coefficient is the one of two classes.
CORRELATIONS = ("matthews_correlation", "pearson", "spearmanr")
#: Most digits of a metric.
MAX_DIGITS = 6
#: Options of this run that say nothing of its result.
LOCAL_OPTIONS = ("output", "resume", "overwrite")

USE = """\
```python
from transformers import {auto_class}, AutoTokenizer, pipeline

import hf_linear_attn as hla

source = "."  # this folder; or its repository on the Hub
model = hla.load_pretrained(source, {auto_class})
tokenizer = AutoTokenizer.from_pretrained(source)
print(pipeline("{pipeline}", model=model, tokenizer=tokenizer)({text}))
```

Where the package is installed, `from_pretrained(source, trust_remote_code=True)` of that class gives the same model. \
Without either it must not be used: its weights were trained for linear attention."""


def standard_error(metric: str, values: Mapping[str, float], rows: int) -> float | None:
    """Return the standard error of a metric over so many rows; None where it has no simple form.

    That of an accuracy p is `√(p (1 - p) / n)` with two right and two wrong answers more, so that it is not 0 for 1.0
    (Agresti and Coull 1998); that of a correlation r is `(1 - r²) / √(n - 1)`; that of a loss was computed from its
    rows, and the perplexity's follows from it.
    """
    value = values[metric]
    if metric.endswith("accuracy") and rows:
        share = (value * rows + 2) / (rows + 4)
        return math.sqrt(share * (1 - share) / (rows + 4))
    if metric.endswith(CORRELATIONS) and rows > 1:
        return (1 - value**2) / math.sqrt(rows - 1)
    if metric.endswith("loss"):
        return values.get(f"{metric}_stderr")
    if metric.endswith("perplexity"):
        loss = values.get(f"{metric.removesuffix('perplexity')}loss_stderr")
        return None if loss is None else value * loss
    return None


def with_error(metric: str, values: Mapping[str, float], rows: int) -> str:
    """Return a metric as text with its standard error, `0.84 ± 0.02`: two digits, or as many as show the error.

    Without an error as many show two digits of a small value. A cosine of embeddings, and the loss that is 1 minus it,
    have four digits: they differ in the last ones.
    """
    value, stderr = values[metric], standard_error(metric, values, rows)
    least = 4 if stderr is None and "cosine" in values else 2
    smallest = value / 5 if stderr is None else 2 * stderr
    shown = math.ceil(-math.log10(abs(smallest))) if smallest and math.isfinite(smallest) else least
    digits = min(max(shown, least), MAX_DIGITS)
    return fixed(value, digits) + ("" if stderr is None else f" ± {stderr:.{digits}f}")


def validation_rows(facts: Mapping[str, Any], metric: str) -> int:
    """Return the number of validation rows of a metric. Where there are several sets its name begins with its set's."""
    own = (f"validation_{metric.partition('_')[0]}_rows", "validation_rows")
    return next((facts["data"][name] for name in own if name in facts["data"]), 0)


def comparison(facts: dict[str, Any], state: dict[str, Any]) -> str:
    """Return sentences about the student's metric beside that of the control, if any, else of the teacher.

    Nothing is said where the data cannot measure attention: the teacher must be clearly better than the same answer to
    all rows, or than itself with attention switched off. A share of a metric that is not positive says nothing either.
    """
    metric, higher = facts["goal"]["metric"], facts["goal"]["greater_is_better"]
    name = "control" if state.get("control") else "teacher"
    student, base = final_metrics(state), state.get(name) or {}
    own, reference = (math.nan if values.get(metric) is None else values[metric] for values in (student, base))
    if not (math.isfinite(own) and math.isfinite(reference)):
        return ""
    if problem := _inconclusive(facts, state, metric, higher):
        return problem
    assessment = assess(own, reference, None, higher_is_better=higher)
    one = Comparison(Score("", metric, metric, higher), Quality(own), Quality(reference), name == "control", assessment)
    if one.share is None or reference <= 0:
        return ""
    texts = [with_error(metric, values, validation_rows(facts, metric)) for values in (student, base)]
    if one.better:
        sentence = f"The {metric} is better than the {name}'s, {texts[0]} against {texts[1]}."
    elif higher:
        sentence = f"This is {100 * one.share:.1f} % of the {name}'s {metric}."
    else:
        sentence = f"The {metric} is {100 * (1 / one.share - 1):.1f} % above the {name}'s."
    if state.get("distilled") and name == "teacher" and metric != "cosine":  # that of itself is 1, trained or not
        sentence += " The teacher was not trained in the last stage; `--control` trains it as long."
    return sentence


def _inconclusive(facts: dict[str, Any], state: dict[str, Any], metric: str, higher: bool) -> str:
    """Return why the data cannot measure attention; empty if they can."""
    teacher, without, rows = state.get("teacher") or {}, state.get("no attention") or {}, validation_rows(facts, metric)
    value, constant = teacher.get(metric), facts.get("most_frequent_answer")
    if value is None or (constant is None and metric not in without):
        return ""
    # Of classes, where nothing else is known, the largest standard error of an accuracy.
    unknown = 0.0 if constant is None or not higher else (0.25 / max(rows, 1)) ** 0.5
    measured = (teacher, without if metric in without else teacher)
    stderr = math.hypot(*(standard_error(metric, values, rows) or unknown for values in measured))
    options: dict[str, Any] = {"higher_is_better": higher, "most_frequent_answer": constant, "stderr": stderr}
    assessment = assess(None, value, without.get(metric), **options)
    if assessment.valid:
        return ""
    if assessment.floor == constant:
        reason = "it has not learned the task, so nothing can be said about attention."
        floor = f"that of {assessment.floor_name} ({constant:.2f})"
        return f"The teacher's {metric} ({value:.2f}) is not clearly better than {floor}: {reason}"
    texts = [with_error(metric, values, rows) for values in (teacher, without)]
    return (
        f"These data cannot measure attention: the teacher's {metric} ({texts[0]}) is not clearly better than with its "
        f"attention switched off ({texts[1]}). Give longer texts, or those that the model was made for."
    )


def results_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The stages' metrics as lines of a Markdown table."""
    stages: list[tuple[str, dict[str, Any]]] = []
    for stage, title in STAGES:
        if state.get(stage) and not (stage == "converted" and stages and state[stage] == stages[-1][1]):
            stages.append((title, state[stage]))
    if not stages:
        return []
    names = dict.fromkeys(name for _, values in stages for name in values if not name.endswith("_stderr"))
    rows = {name: validation_rows(facts, name) for name in names}
    cells = [
        [title, *(with_error(name, values, rows[name]) if values.get(name) is not None else "–" for name in names)]
        for title, values in stages
    ]
    sentence = comparison(facts, state)
    return _table(["", *names], cells, numbers=len(names)) + (["", sentence] if sentence else [])


def budget_lines(config: TrainingRunConfig, facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """What was chosen for a budget and why, and whether the model as saved is within it, where that was measured."""
    text, reason = getattr(config, "budget", None), state.get("exact_heads", {}).get("reason")
    if not text or not reason:
        return []
    budget, lines, value, measured = Budget.parse(text), [f"For {text}: {reason}."], None, ""
    if budget.cost == "speedup":
        speed = state.get("speed") or {}
        rows = dict(zip(speed.get("lengths", ()), speed.get("rows", {}).get("student", ()), strict=True))
        timed = rows.get(budget.length)
        if timed is not None and is_measurable(timed["speedup_p20"], timed["speedup_p80"]):
            value, measured = timed["speedup"], f"{timed['speedup']:.2f}x"
        else:
            known = "not known" if timed is None else NOT_MEASURABLE
            problem = f"The speed of the saved model at {budget.length:,} tokens is {known}"
            lines += ["", f"{problem}: nothing says whether it is within the budget."]
    elif budget.unit is not None:
        recall = budget.unit.name == "recall"
        exact = state.get("recall, teacher" if recall else "teacher")
        saved = state.get("recall, this model") if recall else final_metrics(state)
        metric = facts["goal"]["metric"]
        value = budget.unit.damage(scored(exact, metric), scored(saved, metric)) if exact and saved else None
        measured = "" if value is None else budget.unit.format(value)
    if measured:
        lines += ["", f"As saved: {measured}, which is {'within' if budget.is_met(value) else 'beyond'} the budget."]
    return lines


def recall_table(state: dict[str, Any]) -> list[str]:
    """What teacher and model recall, with 95 % intervals, as lines of a Markdown table."""
    rows = []
    for name in ("teacher", "this model"):
        if values := state.get(f"recall, {name}"):
            interval = f"{values['low']:.2f} to {values['high']:.2f}"
            prompts = [f"{values['length']:,}", str(values["prompts"])]
            rows.append([name, *prompts, f"{values['recall']:.2f}", interval])
            asked = RECALL_TITLES[values.get("task", "niah_multikey_1")]
    return _table([f"recall: {asked}", "tokens", "prompts", "score", "95 % interval"], rows, numbers=4) if rows else []


def _table(titles: list[str], rows: list[list[str]], numbers: int) -> list[str]:
    """Lines of a Markdown table whose last columns, as many as `numbers`, are aligned on the right."""
    alignment = ["---"] * (len(titles) - numbers) + ["---:"] * numbers
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (titles, alignment, *rows)]


def exactness(counts: dict[str, int]) -> str:
    """Return a sentence about the inputs that the mechanism attends to exactly."""
    longer = f"of {counts['inputs']:,} training inputs {counts['longer']:,} are longer"
    return f"Inputs of up to {counts['exact_length']:,} tokens are attended to exactly; {longer}."


def speed_table(state: dict[str, Any]) -> list[str]:
    """Times of one forward pass beside the teacher's, as lines of a Markdown table.

    A ratio that varies more than it differs from 1 says nothing (see `utils.timing.is_measurable`).
    """
    speed = state.get("speed") or {}
    if not speed.get("lengths"):
        return []
    rows = []
    for length, old, new in zip(speed["lengths"], speed["rows"]["teacher"], speed["rows"]["student"], strict=True):
        ratio, (low, high) = new["speedup"], (new["speedup_p20"], new["speedup_p80"])
        text = f"{ratio:.2f}" if is_measurable(low, high) else NOT_MEASURABLE
        times = [f"{1e3 * timing['value']:.1f} ms" for timing in (old, new)]
        rows.append([f"{length:,}", *times, f"{text} ({low:.2f} to {high:.2f})"])
    lines = _table(["tokens", "teacher", "this model", "times as fast (p20 to p80)"], rows, numbers=4)
    limit = speed.get("longest_input")
    if limit is not None and max(speed["lengths"]) > limit:
        reach = f"The model was made for inputs of up to {limit:,} tokens. Of longer ones only the times are known"
        lines += ["", f"{reach}: nothing is said about what it answers to them."]
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


def layers_table(facts: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The linear layers, and what the linear part of each is worth: the loss without it, minus that with it."""
    titles = ["layer", "attention", "exact heads", "learned parameters", "bytes of state"]
    rows = []
    for layer in facts["layers"]:
        exact = "all" if layer["attention"] == EXACT else ", ".join(map(str, layer["exact_heads"])) or "–"
        sizes = [f"{layer['parameters']:,}", f"{layer['state_bytes']:,}"]
        rows.append([str(layer["index"]), layer["attention"], exact, *sizes])
    parts = {part["layer"]: part for part in state.get("linear parts", {}).get("layers", ())}
    if parts:
        titles.append("worth of the linear part")
        for cells, layer in zip(rows, facts["layers"], strict=True):
            cells.append(_worth(parts[layer["index"]]) if layer["index"] in parts else "")
    return _table(titles, rows, numbers=len(titles) - 3) if rows else []


def _worth(part: dict[str, Any]) -> str:
    """Return what a linear part is worth, such as `+0.0123 ± 0.0010` or `-0.5000, closed`."""
    error = "" if part.get("stderr") is None else f" ± {part['stderr']:.4f}"
    return f"{part['worth']:+z.4f}{error}{'' if part['kept'] else ', closed'}"


def model_card(config: TrainingRunConfig, facts: dict[str, Any], state: dict[str, Any]) -> str:
    """The card as Markdown with its YAML header."""
    source = public(config.model or config.model_type or "")
    name = model_name(config.model) if config.model else source
    data = public(config.data.task or config.data.dataset or "")
    kinds = sorted({layer["attention"] for layer in facts["layers"]})
    versions = ", ".join(f"{name} {version}" for name, version in facts["environment"]["versions"].items())
    numbers = ", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in facts["data"].items())
    hardware = facts["environment"]["hardware"]
    quality, speed = results_table(facts, state), speed_table(state)
    if quality and facts.get("beyond_exact"):
        skipped = state.get("transfer", {}).get("skipped", "")
        quality += ["", f"{exactness(facts['beyond_exact'])} {skipped}".rstrip()]
    if quality and "±" in "".join(quality):
        quality += ["", "± is the standard error over the validation rows."]
    if speed:
        where = f"{hardware.get('device')} ({hardware.get('cpu')})"
        speed = [f"One forward pass, batch 1, medians, side by side on {where}.", "", *speed]
    (_, pipeline, text), auto_class = PIPELINES[config.resolved_task_type], AUTO_CLASSES[config.resolved_task_type]
    columns = TASKS.get(config.data.task).columns if config.data.task else config.data.text_columns
    if config.resolved_task_type == "classification" and len(columns) == 2:
        text = PAIR_EXAMPLE
    changed = changed_options(to_dict(config), to_dict(type(config)().completed()))
    settings = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    sections = {
        "Use": [USE.format(auto_class=auto_class, pipeline=pipeline, text=text)] if kinds else [],
        "Budget": budget_lines(config, facts, state),
        "Quality": quality,
        "Recall": recall_table(state),
        "Speed": speed,
        "Settings": [
            "Options that are not the default; `results.json` of the run has all.",
            "",
            f"```yaml\n{settings}```",
        ],
        "Layers": layers_table(facts, state),
        "Data and versions": [f"{numbers}. {versions}. {facts['processes']} process(es)."],
    }
    origin = "random weights of " if config.from_config or config.model_type is not None else ""
    parts = [
        f"---\n{_header(config, facts, state, kinds).to_yaml()}\n---",
        f"# {name.rpartition('/')[2]} with {', '.join(kinds) or 'exact'} attention",
        f"Made with hf-linear-attn {__version__} from {origin}`{source}` on `{data}`.",
        *("\n".join([f"## {title}", "", *lines]) for title, lines in sections.items() if lines),
    ]
    return "\n\n".join(parts) + "\n"


def _header(config: Any, facts: dict[str, Any], state: dict[str, Any], kinds: list[str]) -> ModelCardData:
    """Return what the Hub reads. It refuses names of models and data sets that are none of its own."""
    repository = TASKS.get(config.data.task).hub[0] if config.data.task else config.data.dataset
    pipeline, metric = PIPELINES[config.resolved_task_type][0], facts["goal"]["metric"]
    final = final_metrics(state)
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=str(repository) if _on_hub(repository) else "private",
            dataset_name=public(config.data.task or config.data.dataset or "private"),
            metric_type=name,
            metric_value=value,
        )
        for name, value in final.items()
        if isinstance(value, (int, float)) and math.isfinite(value) and not name.endswith("_stderr")
    ]
    name = (model_name(config.model) if config.model else config.model_type) or "model"
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["hf-linear-attn", *(["linear-attention"] if kinds else [])],
        base_model=_base_model(config.model),
        license=_license(config.model),
        datasets=[str(repository)] if _on_hub(repository) else None,
        metrics=[metric] if final else None,
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
        ignore_metadata_errors=True,
    )


def final_metrics(state: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the model as saved."""
    stages = ("converted", "trained", "distilled", "transferred", "patched")  # earlier versions left out "converted"
    return next((state[stage] for stage in stages if state.get(stage)), {})


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
