"""One model, several mechanisms: quality before and after attention transfer, and speed. The result is plain data."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS, AttentionEntry
from ..training.transfer import transfer_attention
from .decoding import decode_speed
from .embeddings import agreement, sentence_embeddings, unrelated_cosine
from .fidelity import measure_fidelity
from .perplexity import measure_perplexity
from .speed import (
    FREE,
    can_go_beyond,
    has_position_table,
    layer_speed,
    model_speed,
    shared_copy,
    timing_options,
    without_attention,
)
from .texts import Text, make_batches, pad_id, passages, whole_documents
from .timing import SpeedTable, amdahl_ceiling, amdahl_share

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths in tokens, budget in seconds for each timed length; evaluations: how often the
    validation sequences are looked at during a transfer, to keep its best step."""

    attentions: tuple[str, ...]
    steps: int
    sequence_length: int
    batch_size: int
    evaluations: int
    train_sequences: int
    validation_sequences: int
    held_out_sequences: int
    fidelity_sequences: int
    perplexity_tokens: int
    lengths: tuple[int, ...]
    budget: float
    seed: int


class Progress(Protocol):
    """What a study tells while it runs."""

    def start(self, task: str, total: int | None = None) -> None:
        """A new task begins; total: its steps, if known."""

    def update(self, step: int | None = None, note: str = "") -> None:
        """The current task is at this step."""

    def say(self, line: str) -> None:
        """A result that stays on the screen."""


@dataclass(frozen=True)
class Data:
    """Token ids and batches of one text for one model. `validation` chooses among training steps, and is not trained
    on; `held_out` is used for nothing but the numbers of the report."""

    train: list[Batch]
    validation: list[Batch]
    fidelity: list[Batch]
    held_out: list[Batch]
    documents: list[list[int]]
    tokens: list[int]
    facts: dict[str, Any]


def prepare(text: Text, tokenizer: Any, plan: Plan) -> Data:
    """Cut the text into batches.

    Raises:
        ValueError: too little text for a single batch of training and of measuring.
    """
    length, pad = plan.sequence_length, pad_id(tokenizer)
    train = passages(tokenizer, text.train, length, plan.train_sequences)
    held_out = passages(tokenizer, text.held_out, length, plan.held_out_sequences)
    if len(train) < 4 or len(held_out) < 2:
        raise ValueError(
            f"{text.source!r} gives {len(train)} training and {len(held_out)} held-out sequences of up to {length} "
            "tokens; 4 and 2 are needed. Give a longer text."
        )
    random.Random(plan.seed).shuffle(train)
    kept = max(1, min(plan.validation_sequences, len(train) // 4))
    validation, train = train[:kept], train[kept:]
    spread = len(held_out) / min(plan.fidelity_sequences, len(held_out))
    chosen = [held_out[int(index * spread)] for index in range(min(plan.fidelity_sequences, len(held_out)))]
    documents = whole_documents(tokenizer, text.held_out, plan.perplexity_tokens)
    facts = {
        "source": text.source,
        "sha256": text.sha256,
        "characters": text.characters,
        "train_documents": len(text.train),
        "held_out_documents": len(text.held_out),
        "sequence_length": length,
        "train_sequences": len(train),
        "train_tokens": sum(map(len, train)),
        "validation_sequences": len(validation),
        "held_out_sequences": len(held_out),
        "held_out_tokens": sum(map(len, held_out)),
        "fidelity_sequences": len(chosen),
        "fidelity_tokens": sum(map(len, chosen)),
    }
    return Data(
        make_batches(train, plan.batch_size, pad),
        make_batches(validation, plan.batch_size, pad),
        make_batches(chosen, plan.batch_size, pad),
        make_batches(held_out, plan.batch_size, pad),
        documents,
        [token for sequence in held_out for token in sequence],
        facts,
    )


class Study:
    """Runs the measurements of one model and holds their results as plain data."""

    def __init__(
        self, model: PreTrainedModel, *, decoder: bool, data: Data, plan: Plan, baseline: str, progress: Progress
    ) -> None:
        self.model = model.eval()
        self.decoder = decoder
        self.data = data
        self.plan = plan
        self.baseline = baseline
        self.progress = progress
        self.patched: dict[str, PreTrainedModel] = {}
        self._exact_embeddings: Tensor | None = None

    def run(self) -> dict[str, Any]:
        """Everything, as the parts `exact`, `control`, `mechanisms`, `speed` and `decode` of the report."""
        exact, control = self.references()
        mechanisms = [self.mechanism(name) for name in self.plan.attentions]
        speed = self.speed()
        decode = self.decode() if self.decoder else None
        return {"exact": exact, "control": control, "mechanisms": mechanisms, "speed": speed, "decode": decode}

    # ---------------------------------------------------------------------------------------------- quality

    def references(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The exact model, and the control: the same model with its attention switched off."""
        self.progress.start("exact model and control")
        exact = self._task(self.model)
        if self._exact_embeddings is not None:
            exact["unrelated_cosine"] = unrelated_cosine(self._exact_embeddings)
        return exact, self._task(without_attention(self.model))

    def _task(self, model: PreTrainedModel) -> dict[str, Any]:
        """What the model as a whole is worth: perplexity of a decoder, sentence embeddings of an encoder."""
        if self.decoder:
            context = min(self.plan.sequence_length, longest_input(self.model) or self.plan.sequence_length)
            measured = measure_perplexity(
                model,
                self.data.documents,
                context=context,
                stride=max(context // 2, 1),
                batch_size=self.plan.batch_size,
            )
            return {"perplexity": asdict(measured)}
        embeddings = sentence_embeddings(model, self.data.held_out)
        if self._exact_embeddings is None:
            self._exact_embeddings = embeddings
        return {"sentences": asdict(agreement(self._exact_embeddings, embeddings))}

    def _quality(self, model: PreTrainedModel) -> dict[str, Any]:
        fidelity = measure_fidelity(model, self.data.fidelity)
        return {
            "kl": fidelity.kl,
            "output_error": fidelity.output_error,
            "final_cosine": fidelity.final_cosine,
            "tokens": fidelity.tokens,
            "layers": [asdict(layer) for layer in fidelity.layers],
            **self._task(model),
        }

    def mechanism(self, name: str) -> dict[str, Any]:
        """Patch a copy, measure, transfer, measure again."""
        entry = ATTENTIONS.get(name)
        options = default_options(entry, self.plan.seed)
        model = patch_model(shared_copy(self.model), name, **options)
        self.patched[name] = model
        report = patch_report(model)
        self.progress.start(f"{name}: untrained")
        result: dict[str, Any] = {
            "name": name,
            "description": entry.description,
            "paper": entry.paper,
            "options": report.layers[0].options,
            "learned": entry.learned,
            "learned_parameters": report.parameters,
            "untrained": self._quality(model),
            "transfer": None,
            "trained": None,
        }
        if entry.learned:
            result["transfer"] = self._transfer(name, model)
            self.progress.start(f"{name}: trained")
            result["trained"] = self._quality(model)
        self.progress.say(quality_line(result))
        return result

    def _transfer(self, name: str, model: PreTrainedModel) -> dict[str, Any]:
        steps = self.plan.steps
        self.progress.start(f"{name}: attention transfer", steps)
        torch.manual_seed(self.plan.seed)
        done = transfer_attention(
            model,
            self.data.train,
            steps=steps,
            held_out=self.data.validation,
            evaluate_every=max(steps // self.plan.evaluations, 1),
            progress=lambda step, steps, loss: self.progress.update(step, f"loss {loss:.3f}"),
        )
        return asdict(done)

    # ---------------------------------------------------------------------------------------------- speed

    def _timed_models(self) -> dict[str, PreTrainedModel]:
        """The models to time; those that are built for a largest length are built again for the longest one."""
        longest, limit = max(self.plan.lengths), longest_input(self.model)
        models = {self.baseline: self.model}
        for name, model in self.patched.items():
            entry = ATTENTIONS.get(name)
            options = default_options(entry, self.plan.seed)
            timed = timing_options(options, [field.name for field in fields(entry.options)], limit, longest)
            models[name] = model if timed == options else patch_model(shared_copy(self.model), name, **timed)
        return models

    def speed(self) -> dict[str, Any]:
        """The whole model and one attention layer against the baseline, at every length."""
        models = self._timed_models()
        limit, lengths = longest_input(self.model), self.plan.lengths
        notes = []
        whole = lengths
        if limit is not None and max(lengths) > limit:
            if not can_go_beyond(self.model):
                whole = tuple(length for length in lengths if length <= limit) or (limit,)
                notes.append(f"The whole model takes {limit:,} positions; beyond that only one layer was timed.")
            elif has_position_table(self.model):
                notes.append(
                    f"The model has {limit:,} positions. Beyond them its position numbers begin again from zero: that "
                    "changes nothing about the time, but the outputs there mean nothing and no quality was measured."
                )
            else:
                notes.append(
                    f"The model was trained on up to {limit:,} positions. Its rotary positions go on beyond them, so "
                    "the times are those of real runs, but no quality was measured there."
                )
        self.progress.start("speed of the whole model", len(whole))
        free = {FREE: without_attention(self.model)}
        table = model_speed(
            {**models, **free},
            self.data.tokens,
            whole,
            baseline=self.baseline,
            budget=self.plan.budget,
            announce=self.progress.update,
        )
        self.progress.start("speed of one attention layer", len(lengths))
        layer = layer_speed(
            models,
            lengths,
            baseline=self.baseline,
            budget=self.plan.budget / 2,
            seed=self.plan.seed,
            announce=self.progress.update,
        )
        table.notes[:0] = notes
        return {"baseline": self.baseline, "model": speed_dict(table), "layer": speed_dict(layer)}

    def decode(self) -> dict[str, Any]:
        """Time and cache of one more token after contexts of every length."""
        contexts = self.plan.lengths
        self.progress.start("decoding", len(contexts))
        models = {self.baseline: self.model, **self.patched}
        rows = decode_speed(
            models,
            self.data.tokens,
            contexts,
            baseline=self.baseline,
            budget=self.plan.budget / 4,
            announce=self.progress.update,
        )
        return {
            "baseline": self.baseline,
            "contexts": list(contexts),
            "states": {name: ATTENTIONS.get(name).state for name in self.patched},
            "rows": {
                name: [{**asdict(row.timing), "cache_bytes": row.cache_bytes} for row in held]
                for name, held in rows.items()
            },
        }


def default_options(entry: AttentionEntry, seed: int) -> dict[str, Any]:
    """The mechanism's defaults, with the study's seed where it has one."""
    return {"seed": seed} if any(field.name == "seed" for field in fields(entry.options)) else {}


def speed_dict(table: SpeedTable) -> dict[str, Any]:
    """A `SpeedTable` as plain data, with crossovers; with the ceiling where the time without attention is known."""
    mechanisms = [name for name in table.rows if name not in (table.baseline, FREE)]
    found: dict[str, Any] = {
        "lengths": table.lengths,
        "rows": {name: [asdict(timing) for timing in timings] for name, timings in table.rows.items()},
        "crossover": {name: asdict(table.crossover(name)) for name in mechanisms},
        "notes": table.notes,
    }
    if FREE in table.rows:
        pairs = zip(table.rows[table.baseline], table.rows[FREE], strict=True)
        ceilings = [amdahl_ceiling(base.median, free.median) for base, free in pairs]
        found["ceiling"] = ceilings
        found["attention_share"] = [amdahl_share(ceiling) for ceiling in ceilings]
    return found


def quality_line(result: dict[str, Any]) -> str:
    """One line of result for the screen."""
    before, after = result["untrained"], result["trained"] or result["untrained"]

    def change(key: str, digits: int = 2) -> str:
        old, new = (round(quality[key], digits) + 0.0 for quality in (before, after))
        return f"{old:.{digits}f}" if result["trained"] is None else f"{old:.{digits}f} -> {new:.{digits}f}"

    parts = [f"KL {change('kl')} nats"] if before["kl"] is not None else []
    parts.append(f"output error {change('output_error')}")
    if "perplexity" in before:
        old, new = before["perplexity"]["perplexity"], after["perplexity"]["perplexity"]
        parts.append(f"perplexity {old:.2f}" + ("" if result["trained"] is None else f" -> {new:.2f}"))
    else:
        parts.append(f"cosine {change('final_cosine', 3)}")
    if result["transfer"] is not None:
        parts.append(f"{result['transfer']['steps']} steps in {result['transfer']['seconds']:.0f} s")
    return f"{result['name']}: " + ", ".join(parts)
