"""One model, several mechanisms: quality before and after attention transfer, and speed. The result is plain data.

Every measurement goes through a store (`measurements.Store`): what it holds is not measured again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from ..integration.attention import SUBMODULE
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS
from ..training.transfer import transfer_attention
from .averages import mean_of, spread_of
from .judges import FidelityJudge, Judge
from .measurements import Store
from .preparing import Data, Plan
from .report import write_aside
from .speed import FREE, shared_copy, without_attention
from .speed_study import SpeedStudy
from .subject import EXACT, Group, Member, Subject, default_options, patched_like

Lazy = Callable[[], PreTrainedModel]

#: Folder beside the measurements for what was learned: a run that is taken up does not train it anew.
LEARNED = "learned"


class Progress(Protocol):
    """What a study tells while it runs."""

    def start(self, task: str, total: int | None = None) -> None:
        """A new task begins; total: its steps, if known."""

    def update(self, step: int | None = None, note: str = "") -> None:
        """The current task is at this step."""

    def say(self, line: str) -> None:
        """A result that stays on the screen."""


class Study:
    """Runs the measurements of one model, and returns them as parts of a report.

    judges: what a model as a whole is worth. groups: converted checkpoints. reference: tuned exact ones, which the
    quality is compared with. folder: where learned parts are kept (None: nowhere). task: a further one that this model
    is for; only its score is measured then, not the fidelity.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        data: Data,
        plan: Plan,
        judges: Sequence[Judge],
        progress: Progress,
        store: Store | None = None,
        folder: Path | None = None,
        groups: Sequence[Group] = (),
        reference: Group | None = None,
        task: str | None = None,
    ) -> None:
        self.subject, self.model = subject, subject.model
        self.data, self.plan, self.judges, self.progress = data, plan, list(judges), progress
        self.store = Store(None) if store is None else store
        if store is None:
            self.store.begin("study", {}, {})
        self.folder, self.groups, self.reference = folder, list(groups), reference
        self.patched_judges = [*([FidelityJudge(data)] if task is None else []), *self.judges]
        self.label = "" if task is None else f"{task}, "

    def run(self) -> dict[str, Any]:
        """Everything, as the parts of the report that follow from measurements."""
        found = self.judge()
        timing = SpeedStudy(self.subject, self.plan, self.data.tokens, self.store, self.progress, self.groups)
        found["speed"] = timing.speed()
        found["decode"] = timing.decode() if self.subject.kind == "decoder" and self.plan.decoding else None
        return found

    def judge(self) -> dict[str, Any]:
        """The quality, without times."""
        exact, control = self.references()
        found: dict[str, Any] = {"exact": exact, "control": control, "reference": None}
        if self.reference is not None:
            self.progress.start(f"{self.label}{self.reference.name}: {len(self.reference.members)} checkpoints")
            held = [self.quality(*self._member(self.reference, member)) for member in self.reference.members]
            found["reference"] = {"name": self.reference.name, **_over_seeds("quality", held)}
        found["mechanisms"] = [self.mechanism(name) for name in self.plan.attentions]
        found["mechanisms"] += [self.converted(group) for group in self.groups]
        return found

    # ---------------------------------------------------------------------------------------------- quality

    def quality(self, identity: Mapping[str, Any], model: Lazy, judges: Sequence[Judge] | None = None) -> Any:
        """What the judges find, and the ids of their measurements."""
        found: dict[str, Any] = {}
        ids: dict[str, str] = {}
        for judge in self.judges if judges is None else judges:
            measured = self.store.measured(
                self.subject.key(identity, judge.measure),
                lambda judge=judge: judge(model()),  # type: ignore[misc]
            )
            found.update(measured.value)
            ids[judge.measure["what"]] = measured.id
        return {**found, "measurements": ids}

    def references(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The exact model, and the control: the same model with its attention switched off."""
        self.progress.start(f"{self.label}exact model and control")
        exact = self.quality({"name": EXACT}, lambda: self.model)
        return exact, self.quality({"name": FREE}, cache(lambda: without_attention(self.model)))

    def mechanism(self, name: str) -> dict[str, Any]:
        """Patch a copy, measure, transfer, measure again; for each seed."""
        entry = ATTENTIONS.get(name)
        trains = entry.learned and self.plan.steps > 0
        seeds = self.plan.seeds or (self.plan.seed,)
        if not trains and not default_options(entry, 0):
            seeds = seeds[:1]
        shell = patch_model(shared_copy(self.model), name, **default_options(entry, seeds[0]))
        report = patch_report(shell)
        runs = [self._conversion(name, seed, trains) for seed in seeds]
        options = next(layer.options for layer in report.layers if layer.attention == name)
        result: dict[str, Any] = {
            "name": name,
            "attention": name,
            "origin": "patched",
            "description": entry.description,
            "paper": entry.paper,
            "options": options,
            "learned": entry.learned,
            "learned_parameters": report.parameters,
            "seeds": list(seeds),
            **_over_seeds("untrained", [run["untrained"] for run in runs]),
            "transfer": runs[0]["transfer"],
            **(_over_seeds("trained", [run["trained"] for run in runs]) if trains else {"trained": None}),
        }
        if len(runs) > 1:
            result["runs"] = runs
        self.progress.say(quality_line(result, self.label))
        return result

    def _conversion(self, name: str, seed: int, trains: bool) -> dict[str, Any]:
        """One seed: untrained, and after the transfer."""
        entry = ATTENTIONS.get(name)
        options = default_options(entry, seed)
        patched = cache(lambda: patch_model(shared_copy(self.model), name, **options))
        identity = {"name": name, "options": options, "state": "untrained"}
        self.progress.start(f"{self.label}{name}: untrained")
        judges = self.patched_judges
        run: dict[str, Any] = {"seed": seed, "untrained": self.quality(identity, patched, judges)}
        run.update(transfer=None, trained=None)
        if not trains:
            return run
        identity = {**identity, "state": "transferred", "training": self._training(seed)}
        trained = cache(lambda: self._transferred(name, identity, patched, seed))
        key = self.subject.key(identity, {"what": "transfer"})
        if self.store.known(key) is None:
            trained()
        held = self.store.newest(key)
        assert held is not None
        run["transfer"] = {**held.value, "measurement": held.id}
        self.progress.start(f"{self.label}{name}: trained")
        run["trained"] = self.quality(identity, trained, judges)
        return run

    def _training(self, seed: int) -> dict[str, Any]:
        """What a transfer depends on, for its key."""
        plan, facts = self.plan, self.data.facts
        return {
            "seed": seed,
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "evaluations": plan.evaluations,
            "data": facts["sha256"],
            "order": plan.seed,
            **{name: facts[name] for name in ("sequence_length", "train_sequences", "validation_sequences")},
        }

    def _transferred(self, name: str, identity: Mapping[str, Any], patched: Lazy, seed: int) -> PreTrainedModel:
        """The patched model with its learned parts trained: those on disk, or else by a transfer."""
        model, key = patched(), self.subject.key(identity, {"what": "transfer"})
        path = None if self.folder is None else self.folder / LEARNED / f"{key.id}.safetensors"
        if path is not None and path.is_file() and self.store.known(key) is not None:
            model.load_state_dict(load_file(path), strict=False)
            return model
        self.progress.start(f"{self.label}{name}: attention transfer", self.plan.steps)
        torch.manual_seed(seed)
        batches = list(self.data.train)
        if seed != self.plan.seed:  # or else seeds would differ in nothing where nothing is drawn
            random.Random(seed).shuffle(batches)
        done = transfer_attention(
            model,
            batches,
            steps=self.plan.steps,
            held_out=self.data.validation,
            evaluate_every=max(self.plan.steps // self.plan.evaluations, 1),
            progress=lambda step, steps, loss: self.progress.update(step, f"loss {loss:.3f}"),
        )
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            write_aside(path, save(_learned_tensors(model)))
        self.store.add(key, asdict(done), seconds=done.seconds)
        return model

    # ---------------------------------------------------------------------------------------------- converted

    def _member(self, group: Group, member: Member) -> tuple[dict[str, Any], Lazy]:
        """The identity of a checkpoint, and how it is loaded (once)."""
        state = "converted" if group.layers else "tuned"
        return {"name": group.attention, "state": state, "fingerprint": member.fingerprint}, cache(member.load)

    def converted(self, group: Group) -> dict[str, Any]:
        """Checkpoints that were converted before: each is measured as it is."""
        self.progress.start(f"{self.label}{group.name}: {len(group.members)} checkpoints")
        entry = ATTENTIONS.get(group.attention)
        runs = [self.quality(*self._member(group, member), self.patched_judges) for member in group.members]
        result: dict[str, Any] = {
            "name": group.name,
            "attention": group.attention,
            "origin": "converted",
            "description": f"{entry.description}; {len(group.layers)} converted layers",
            "paper": entry.paper,
            "options": group.options,
            "learned": entry.learned,
            "learned_parameters": patch_report(patched_like(group, self.model)).parameters,
            "folders": [member.folder for member in group.members],
            "seeds": list(range(len(group.members))),
            "untrained": None,
            "transfer": None,
            **_over_seeds("trained", runs),
        }
        if len(runs) > 1:
            result["runs"] = [
                {"folder": member.folder, "trained": run} for member, run in zip(group.members, runs, strict=True)
            ]
        self.progress.say(quality_line(result, self.label))
        return result


def _learned_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    held = model.state_dict()
    return {name: held[name].contiguous().cpu() for name in held if f".{SUBMODULE}." in f".{name}"}


def _over_seeds(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean under this name and, of several, the standard deviation under `name_spread`."""
    spread = spread_of(found)
    return {name: mean_of(found), **({} if spread is None else {f"{name}_spread": spread})}


def quality_line(result: Mapping[str, Any], label: str = "") -> str:
    """One line of result for the screen."""
    before, after = result["untrained"] or result["trained"], result["trained"] or result["untrained"]
    single = result["trained"] is None or result["untrained"] is None

    def change(read: Callable[[Mapping[str, Any]], float], digits: int) -> str:
        old, new = (round(read(quality), digits) + 0.0 for quality in (before, after))
        return f"{new:.{digits}f}" if single else f"{old:.{digits}f} -> {new:.{digits}f}"

    parts = [f"KL {change(lambda held: held['kl'], 2)} nats"] if before.get("kl") is not None else []
    if "output_error" in before:
        parts.append(f"output error {change(lambda held: held['output_error'], 2)}")
    if "perplexity" in before:
        parts.append(f"perplexity {change(lambda held: held['perplexity']['perplexity'], 2)}")
    elif "task" in before:
        parts.append(f"score {change(lambda held: held['task']['score'], 3)}")
    else:
        parts.append(f"cosine {change(lambda held: held['final_cosine'], 3)}")
    if result["transfer"] is not None:
        parts.append(f"{result['transfer']['steps']} steps in {result['transfer']['seconds']:.0f} s")
    if len(result["seeds"]) > 1:
        parts.append(f"mean of {len(result['seeds'])}")
    return f"{label}{result['name']}: " + ", ".join(parts)
