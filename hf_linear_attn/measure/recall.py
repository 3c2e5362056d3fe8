"""Recall of something said once, far back: by distance and by depth, with synthetic prompts made of tokens.

Decoders answer by generating, greedily. Encoders answer by retrieval: which of many long documents holds a sentence?
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import GenerationConfig, PreTrainedModel

from ..data.recall_prompts import KEY, NAMES, TASKS, Prompt, PromptMaker, check_positions
from ..data.text import pad_token, padded_batches
from ..utils.models import evaluation_mode
from ..utils.progress import OnBatch, report_nothing
from .quality import Score, sentence_embeddings
from .values import Metric, Values, value

if TYPE_CHECKING:
    import pandas

#: For each task, length and depth: prompts of decoders, and documents of encoders, of which one must be retrieved.
RECALL_PROMPTS, RECALL_DOCUMENTS = 4, 16

RECALL = Score("recall", "recall", "recall", digits=2)

#: The task of encoders: which of many documents holds a sentence.
RETRIEVAL = "retrieval"


@dataclass(frozen=True, repr=False)
class Recall:
    """What a model recalled.

    Attributes:
        table: One row per prompt: `task`, `length` (tokens of the prompt), `depth` (0: the beginning, 1: the end),
            `distance` (tokens from where the answer was said to where it is due), `trial`, `correct` (the whole
            answer), `share` (of its tokens).
    """

    table: pandas.DataFrame

    def summary(self, value: str = "correct") -> pandas.DataFrame:
        """Return the share of correct answers (or of their tokens: `share`): a row per task, a column per length."""
        return self.table.pivot_table(index="task", columns="length", values=value, aggfunc="mean", sort=False)

    def __repr__(self) -> str:
        text = self.summary().to_string(float_format="{:.2f}".format, na_rep="–")
        return f"share of correct answers, by task and length in tokens\n{text}"

    def _repr_html_(self) -> str:
        return self.summary().to_html(float_format="{:.2f}".format, na_rep="–")


def measure_recall(
    model: Any,
    tokenizer: Any,
    *,
    tasks: Sequence[str] | None = None,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    trials: int = 4,
    batch_size: int = 4,
    seed: int = 0,
    on_batch: OnBatch = report_nothing,
) -> Recall:
    """Measure what a model recalls of long inputs, by length and depth.

    Decoders (all that can generate) answer the prompts of `TASKS`: a pass key, one of several needles, the value of a
    key among random pairs, the rest of a passage that begins again. A prompt is the same whatever else is measured.

    Encoders get the task `retrieval`: each of `trials` documents holds another sentence at the same depth, and the
    sentence itself must be most similar to its document, by the cosine of the embeddings. Chance is `1 / trials`, so
    give at least 16. Embeddings are mean-pooled, or those of a `SentenceTransformer`.

    Args:
        model: A decoder, an encoder, or a `SentenceTransformer`; with exact or with linear attention.
        tokenizer: Its tokenizer.
        tasks: Names of `TASKS`; None: all of them.
        lengths: Tokens of a prompt or document.
        depths: Where the answer is said, from 0 (the beginning) to 1 (the end).
        trials: Prompts for each length and depth; of encoders, documents.
        batch_size: Prompts in one call.
        seed: Seed of the prompts.
        on_batch: Called with the prompts done and all prompts.

    Raises:
        NotImplementedError: The model is an encoder-decoder.
        ValueError: An unknown task, numbers out of range, a length without room for the question or beyond a table of
            positions, or too few tokens in the vocabulary.
    """
    import pandas as pd

    decoder = bool(getattr(model, "can_generate", lambda: False)())
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder: give a decoder or an encoder.")
    known = tuple(TASKS) if decoder else (RETRIEVAL,)
    chosen = (tasks,) if isinstance(tasks, str) else tuple(tasks or known)
    for task in chosen:
        if task not in known:
            raise ValueError(f"tasks: {task!r} is none of {', '.join(known)}, which this model can answer.")
    if not lengths or not depths:
        raise ValueError(f"lengths and depths must not be empty, got {lengths} and {depths}.")
    if trials < 1 or batch_size < 1 or not all(0 <= depth <= 1 for depth in depths):
        numbers = f"{trials}, {batch_size}, {depths}"
        raise ValueError(f"trials and batch_size must be positive and depths in 0 to 1, got {numbers}.")
    check_positions(model, max(lengths) + (KEY if decoder else 0))
    maker = PromptMaker(tokenizer, getattr(getattr(model, "config", None), "vocab_size", None))
    cells = [(task, length, depth) for task in chosen for length in lengths for depth in depths]
    rows: list[dict[str, Any]] = []
    for task, length, depth in cells:
        on_batch(len(rows), trials * len(cells))
        if decoder:
            generators = [random.Random(f"{seed} {task} {length} {depth} {trial}") for trial in range(trials)]
            prompts = [TASKS[task](maker, generator, length, depth) for generator in generators]
            answers = list(_generate(model, prompts, batch_size, pad_token(tokenizer)))
        else:
            prompts, answers = _retrieve(model, maker, length, depth, trials, batch_size, seed)
        cell = {"task": task, "length": length, "depth": depth}
        for trial, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            same = [own == expected for own, expected in zip(answer, prompt.answer, strict=True)]
            outcome = {"correct": all(same), "share": sum(same) / len(same)}
            rows.append({**cell, "distance": len(prompt.ids) - prompt.position, "trial": trial, **outcome})
    return Recall(pd.DataFrame(rows))


def recall_trials(model: PreTrainedModel) -> int:
    """Return how many prompts of each task, length and depth `recall_metric` takes; of encoders, documents."""
    return RECALL_PROMPTS if model.can_generate() else RECALL_DOCUMENTS


def recall_metric(exact: PreTrainedModel, tokenizer: Any, lengths: Sequence[int], *, seed: int = 0) -> Metric:
    """Return the metric of `measure_recall`: the share of correct answers, and that of each task, length and depth.

    Its `divergence` is the share of the answers' tokens that the exact model has right beyond those of the model.

    Raises:
        ValueError: As `measure_recall`, before anything is measured.
    """
    check_positions(exact, max(lengths) + KEY)
    maker = PromptMaker(tokenizer, exact.config.vocab_size)
    decoder, trials = exact.can_generate(), recall_trials(exact)
    for make_prompt in TASKS.values() if decoder else (TASKS["pass_key"],):
        make_prompt(maker, random.Random(seed), min(lengths), 0.5)
    exact_share: list[float] = []  # of the answers' tokens

    def measure(model: PreTrainedModel, on_batch: OnBatch = report_nothing) -> Values:
        options: dict[str, Any] = {"lengths": lengths, "trials": trials, "seed": seed, "on_batch": on_batch}
        table = measure_recall(model, tokenizer, **options).table
        if model is exact or not exact_share:
            reference = table if model is exact else measure_recall(exact, tokenizer, **options).table
            exact_share.append(float(reference["share"].mean()))
        share = float(table["correct"].mean())
        values = [
            value("recall", share, stderr=math.sqrt(share * (1 - share) / len(table))),
            value("divergence", exact_share[0] - float(table["share"].mean())),
            value("longest_input", max(lengths), unit="tokens"),
            value("rows", len(table)),
        ]
        cells = table.groupby(["task", "length", "depth"], sort=False)["correct"].mean()
        for (task, length, depth), cell in cells.items():
            values.append(value("recall_at", cell, prompt=task, tokens=length, depth=depth))
        return values

    return measure


def _generate(model: Any, prompts: Sequence[Prompt], batch_size: int, pad: int) -> Iterator[list[int]]:
    """Yield the greedy answer to each prompt, whatever the model's generation config says; all are equally long."""
    own = model.generation_config
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        ids = torch.tensor([prompt.ids for prompt in part], device=model.device)
        count = max(len(prompt.answer) for prompt in part)
        tokens = {"pad_token_id": pad, "eos_token_id": own.eos_token_id}
        # An argument of `generate` would be completed by the model's own, such as a penalty on repetitions.
        model.generation_config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, **tokens)
        try:
            with evaluation_mode(model):
                output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        finally:
            model.generation_config = own
        for prompt, row in zip(part, output[:, ids.shape[1] :].tolist(), strict=True):
            yield row[: len(prompt.answer)]


def _retrieve(
    model: Any, maker: PromptMaker, length: int, depth: float, count: int, batch_size: int, seed: int
) -> tuple[list[Prompt], list[list[int]]]:
    """Documents with a sentence each, whose number is the answer, and the number of the most similar document."""
    rng = random.Random(f"{seed} {RETRIEVAL} {length} {depth}")
    sentences = [[token for part in maker.statement(rng, rng.choice(NAMES)) for token in part] for _ in range(count)]
    prompts = [
        replace(maker.prompt(rng, length, depth, [([], sentence, [])], question=maker.after), answer=[number])
        for number, sentence in enumerate(sentences)
    ]
    pad = pad_token(maker.tokenizer)
    rows = [prompt.ids for prompt in prompts], [[*maker.before, *one, *maker.after] for one in sentences]
    embedded = [_embed(model, padded_batches(part, batch_size, pad)) for part in rows]
    # What all documents share says nothing about which of them it is.
    documents, questions = (normalize(part - part.mean(dim=0), dim=-1) for part in embedded)
    return prompts, (questions @ documents.T).argmax(dim=1, keepdim=True).tolist()


@torch.no_grad()
def _embed(model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    if isinstance(model, PreTrainedModel):
        return sentence_embeddings(model, batches)
    with evaluation_mode(model):
        inputs = [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches]
        return torch.cat([model(batch)["sentence_embedding"].float().cpu() for batch in inputs])
