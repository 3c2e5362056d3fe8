"""What an evaluation runs on: the model, its data, what is compared with it, and what its folder holds already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .measurements import NAME, Store, now, plain
from .options import EvaluateOptions
from .preparing import Data, Pairs, Plan, prepare, prepare_pairs, prepare_task
from .scores import task_key
from .several import same_names
from .subject import Group, Member, Subject, check_same_model, find_groups, named_apart

TOOL = "hf-linear-attn evaluate"

#: Sequences at once where throughput is timed.
BATCH = 8

#: What a folder's measurements have in common; another value needs another folder.
FIXED = ("model", "fingerprint", "kind", "data", "pairs", "steps", "sequence_length", "seed", "context", "stride")


@dataclass
class Job:
    """A model with its data, its judges and what is compared with it. others: models of further tasks, by task."""

    subject: Subject
    options: EvaluateOptions
    plan: Plan
    data: Data
    judges: list[Any]
    groups: list[Group]
    reference: Group | None
    pairs: Pairs | None
    model_facts: dict[str, Any]
    others: dict[str, Job] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What all measurements of a folder have in common (`FIXED`)."""
        facts = {
            "model": self.subject.name,
            "fingerprint": self.subject.fingerprint,
            "kind": self.subject.kind,
            "data": self.data.facts["sha256"],
            "pairs": None if self.pairs is None else self.pairs.sha256,
        }
        return {**facts, **{name: getattr(self.plan, name) for name in FIXED if name not in facts}}

    def settings(self) -> dict[str, Any]:
        """What the store says of the run: enough to add to it later."""
        groups = [*self.groups, *([] if self.reference is None else [self.reference])]
        return {
            "identity": self.identity(),
            "attentions": list(self.plan.attentions),
            "lengths": list(self.plan.lengths),
            "seeds": None if self.plan.seeds is None else list(self.plan.seeds),
            "backward": self.plan.backward,
            "batch": self.plan.batch,
            "dtype": self.plan.dtype,
            "groups": [_group_facts(group) for group in groups],
            **({"tasks": {task: other.settings() for task, other in self.others.items()}} if self.others else {}),
        }

    def _judged(self) -> dict[str, Any]:
        """How long the inputs are that quality was measured on, by the part of the quality."""
        judged = {"sentences": self.plan.sequence_length, "task": self.data.facts.get("longest_row")}
        judged["perplexity"] = next((judge.context for judge in self.judges if hasattr(judge, "context")), None)
        judged.update({task_key(task): other.data.facts["longest_row"] for task, other in self.others.items()})
        if self.pairs is None:
            return {"judged": judged}
        return {"judged": {**judged, "sts": self.pairs.longest}, "pairs": self.pairs.source}

    def _tasks(self) -> dict[str, Any]:
        """What the report says of further tasks."""
        facts = [{**other.data.facts, "model": other.subject.name} for other in self.others.values()]
        return {"tasks": facts} if facts else {}

    def facts(self, surroundings: Mapping[str, Any], store: Store) -> dict[str, Any]:
        """What the report says besides measurements."""
        from .report import FORMAT_VERSION

        asked = {name: _named(value) for name, value in asdict(self.options).items()}
        settings = {**asked, **asdict(self.plan), "length": user_length(self)}
        return {
            "format_version": FORMAT_VERSION,
            "tool": TOOL,
            "created": now(),
            "settings": settings,
            **surroundings,
            "backend": self.subject.place["device"]["backend"],
            "model": {"name": self.subject.name, "source": self.subject.name, **self.model_facts},
            "text": {**self.data.facts, **self._judged()},
            **self._tasks(),
            "store": _store_facts([self.subject.place, self.subject.place_in(self.plan.dtype)], store),
        }


def _named(value: Any) -> Any:
    """Paths without the folders that they lie in, which say nothing to a reader."""
    if isinstance(value, str) and "/" in value:
        return Path(value).name
    return [_named(held) for held in value] if isinstance(value, (list, tuple)) else value


def _group_facts(group: Group) -> dict[str, Any]:
    members = [{"folder": member.folder, "fingerprint": member.fingerprint} for member in group.members]
    return {"name": group.name, "attention": group.attention, "layers": dict(group.layers), "members": members}


def _store_facts(places: Sequence[Mapping[str, Any]], store: Store) -> dict[str, Any]:
    """What the file holds: also of other machines and versions than these, which this report does not show."""
    mine = [plain({name: place[name] for name in ("device", "versions")}) for place in places]
    other = [held for held in store if {name: held.key[name] for name in ("device", "versions")} not in mine]
    runs = [
        {"run": run.run, "at": run.at, "load": run.environment["hardware"]["load_average_at_start"]}
        for run in store.runs.values()
        if "hardware" in run.environment
    ]
    return {"file": NAME, "measurements": len(store), "elsewhere": len(other), "runs": runs}


def user_length(job: Job) -> int | None:
    """The length of the user's own inputs, if there is anything to time."""
    return job.plan.own if job.plan.lengths else None


def prepare_job(source: str, name: str, options: EvaluateOptions, store: Store) -> Job:
    """Load the model and its data, and those of further tasks; unite what is asked for with what the folder holds.

    Raises:
        ValueError, OSError, ImportError: as `run_evaluate`.
    """
    import torch

    from ..demo import torch_device

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch_device(options.device)
    job = _prepare(source, name, options.for_task(None), device)
    job.options = options
    for task, folder in options.other_tasks.items():
        job.others[task] = _prepare(folder, Path(folder).name, options.for_task(task), device)
        check_same_model(folder, job.others[task].subject.model.config, job.subject.model.config)
    _join_earlier(job, store)
    _check_directions(job)
    for task, other in job.others.items():
        other.plan = replace(other.plan, attentions=job.plan.attentions, seeds=job.plan.seeds, lengths=job.plan.lengths)
        other.groups = same_names(task, other.groups, job.groups)
    return job


def _prepare(source: str, name: str, options: EvaluateOptions, device: Any) -> Job:
    """One model with its data and what is compared with it."""
    import transformers

    from ..demo import is_decoder, model_facts
    from .judges import judges_for
    from .loading import config_and_tokenizer, load_backbone, load_classifier

    config, tokenizer = config_and_tokenizer(source)
    task = options.own_task
    kind = "classifier" if task is not None else "decoder" if is_decoder(config) else "encoder"
    _check_material(kind, options, source)
    auto = {"classifier": "AutoModelForSequenceClassification", "decoder": "AutoModelForCausalLM"}.get(
        kind, "AutoModel"
    )
    auto_class = getattr(transformers, auto)
    groups = find_groups(options.converted or (), auto_class, config, device, exact=False)
    tuned = find_groups(options.baseline or (), auto_class, config, device, exact=True)
    problem = None
    if task is not None:
        problem = _problem(tokenizer, options, config)
        model = load_classifier(source, task, problem, device)
    else:
        model = load_backbone(source, auto, device)
    plan = make_plan(options, model, kind)
    data = _data(options, tokenizer, plan, problem)
    pairs = None if options.sts is None else prepare_pairs(options.sts, tokenizer, plan, options.rows)
    subject = Subject.of(model, kind, name)
    facts = {**model_facts(model, kind == "decoder", auto), "kind": kind, "repr": repr(name)}
    judges = judges_for(kind, model, data, plan, pairs, regression=bool(problem and problem.labels is None))
    return Job(subject, options, plan, data, judges, groups, tuned[0] if tuned else None, pairs, facts)


def _check_material(kind: str, options: EvaluateOptions, source: str) -> None:
    if kind == "decoder" and options.text is None:
        raise ValueError(f"{source!r} is a causal language model: give a text to judge it on with --text FILE.")
    if kind != "encoder" and options.sts is not None:
        raise ValueError(f"sts judges sentence embeddings; {source!r} is a causal language model. Leave it out.")
    if kind != "decoder" and (options.context or options.stride):
        raise ValueError("context and stride are those of a perplexity, and this is no causal language model.")


def _sequence_length(options: EvaluateOptions, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    return options.sequence_length or min(128, limit if isinstance(limit, int) else 128)


def _problem(tokenizer: Any, options: EvaluateOptions, config: Any) -> Any:
    """The rows of the task, encoded as for fine-tuning."""
    from ..data.config import DataConfig
    from ..data.task_data import load_task_data

    length = _sequence_length(options, config)
    batch = max(1, min(32, 1024 // length))
    settings = DataConfig(
        task=options.own_task,
        folder=options.data,
        metrics=options.metrics,
        max_length=length,
        max_train_samples=batch * (28 if options.quick else 122),
        max_eval_samples=options.rows,
    )
    return load_task_data("classification", tokenizer, settings, options.seed)


def make_plan(options: EvaluateOptions, model: Any, kind: str) -> Plan:
    """How much to measure: as the demo, with what was asked for.

    Raises:
        ValueError: a sequence length or a context beyond the model's positions.
    """
    from ..demo import DemoOptions, Loaded
    from ..demo import make_plan as demo_plan
    from ..integration.discovery import longest_input
    from .speed import has_position_table

    attentions = options.attention
    length = options.sequence_length
    if kind == "classifier":
        length = _sequence_length(options, model.config)
    asked = DemoOptions(
        attentions=attentions,
        quick=options.quick,
        lengths=options.lengths,
        sequence_length=length,
        seed=options.seed,
    )
    plan = demo_plan(asked, Loaded(model, None, kind == "decoder", "", {}))
    limit = longest_input(model)
    if options.context is not None and limit is not None and options.context > limit and has_position_table(model):
        raise ValueError(f"context {options.context} is beyond the model's {limit} positions. Use {limit} or less.")
    if options.context is not None and options.stride is None and options.context < 4:
        raise ValueError(f"context {options.context} is too short for a stride of half of it: give stride too.")
    if attentions is None and options.converted:
        plan = replace(plan, attentions=())
    own = options.length or min(limit or 2048, 2048)
    return replace(
        plan,
        steps=plan.steps if options.steps is None else options.steps,
        lengths=tuple(sorted({*plan.lengths, own})),
        budget=options.seconds or plan.budget,
        context=options.context,
        stride=options.stride,
        seeds=options.seeds,
        batch=options.batch or BATCH,
        own=own,
        dtype=options.dtype or str(model.dtype).removeprefix("torch."),
        backward=options.backward,
        layer=False,
        resources=True,
        prefill=True,
    )


def _data(options: EvaluateOptions, tokenizer: Any, plan: Plan, problem: Any) -> Data:
    from .texts import read_text

    if problem is not None:
        return prepare_task(problem, str(options.own_task), plan)
    data = prepare(read_text(options.text), tokenizer, plan)
    if options.text is not None:
        data.facts["source"] = Path(options.text).name
    return data


# --------------------------------------------------------------------------------------------------------------------
# What the folder holds


def _join_earlier(job: Job, store: Store) -> None:
    """Add mechanisms, lengths, seeds and checkpoints of earlier runs, so that the report shows all of them, whole.

    Raises:
        ValueError: the folder's measurements are of another model, other data or other settings.
    """
    runs = [run for run in store.runs.values() if run.tool == TOOL]
    if not runs:
        return
    earlier, mine = runs[-1].settings, plain(job.identity())
    changed = [name for name in FIXED if earlier["identity"].get(name) != mine[name]]
    if changed:
        told = "; ".join(f"{name}: {earlier['identity'].get(name)!r}, now {mine[name]!r}" for name in changed)
        raise ValueError(
            f"The folder {job.options.output!r} holds measurements of other settings ({told}). Give the same ones, or "
            "another folder with --output."
        )
    _check_tasks(job, earlier.get("tasks", {}))
    plan = job.plan
    job.plan = replace(
        plan,
        attentions=_united(earlier["attentions"], plan.attentions if _asked(job.options) else ()),
        lengths=tuple(sorted(_united(earlier["lengths"], plan.lengths if job.options.lengths else _own(job)))),
        seeds=_united(earlier["seeds"] or [plan.seed], plan.seeds) if plan.seeds or earlier["seeds"] else None,
        backward=plan.backward or earlier["backward"],
        batch=job.options.batch or earlier.get("batch", plan.batch),
        dtype=job.options.dtype or earlier.get("dtype", plan.dtype),
    )
    _join_groups(job, earlier)
    for task, other in job.others.items():
        _join_groups(other, earlier.get("tasks", {}).get(task, {"groups": []}))


def _check_tasks(job: Job, earlier: Mapping[str, Any]) -> None:
    """Further tasks of earlier runs must be given again, with the same models and data; others may be new."""
    for task, facts in earlier.items():
        mine = plain(job.others[task].identity()) if task in job.others else None
        if mine is None or any(mine[name] != facts["identity"].get(name) for name in FIXED):
            raise ValueError(
                f"The folder {job.options.output!r} holds measurements of the task {task!r} with the model "
                f"{facts['identity']['model']!r}. Give the same again (--task {task}=FOLDER), or another folder with "
                "--output."
            )


def _join_groups(job: Job, earlier: Mapping[str, Any]) -> None:
    before = [_group_of(facts) for facts in earlier["groups"]]
    job.groups = _united_groups([group for group in before if group.layers], job.groups)
    tuned = _united_groups([group for group in before if not group.layers], [job.reference] if job.reference else [])
    job.reference = tuned[0] if tuned else None


def _asked(options: EvaluateOptions) -> bool:
    """Whether mechanisms were named: what an earlier run measured is not joined by the defaults."""
    return options.attention is not None


def _own(job: Job) -> tuple[int, ...]:
    return () if job.options.length is None else (job.options.length,)


def _united(first: Sequence[Any] | None, second: Sequence[Any] | None) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([*(first or ()), *(second or ())]))


def _group_of(facts: Mapping[str, Any]) -> Group:
    """A group of an earlier run. Its quality is known; its weights are only read where the folder is given again."""

    def missing(folder: str) -> Any:
        def load() -> Any:
            raise ValueError(f"The checkpoint {folder!r} of an earlier run is needed again: give its folder too.")

        return load

    members = [Member(held["folder"], held["fingerprint"], missing(held["folder"])) for held in facts["members"]]
    return Group(facts["name"], facts["attention"], facts["layers"], tuple(members))


def _united_groups(before: Sequence[Group], given: Sequence[Group]) -> list[Group]:
    """Groups of the same layers as one; a checkpoint that is given again can be read again."""
    found = {group.same: group for group in before}
    for group in given:
        known = found.get(group.same)
        if known is None:
            found[group.same] = group
            continue
        members = {member.fingerprint: member for member in (*known.members, *group.members)}
        found[group.same] = replace(known, members=tuple(members.values()))
    return named_apart(list(found.values()))


def _check_directions(job: Job) -> None:
    """Mechanisms that this model cannot have, before anything is measured."""
    from ..patching import patch_model
    from ..registry import ATTENTIONS
    from .speed import shared_copy
    from .subject import default_options

    if not job.plan.attentions and not job.groups:
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    for name in job.plan.attentions:
        try:
            patch_model(shared_copy(job.subject.model), name, **default_options(ATTENTIONS.get(name), job.plan.seed))
        except NotImplementedError as error:
            raise ValueError(f"{name!r} cannot be measured on this model: {error}") from error
