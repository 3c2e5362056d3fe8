"""Recall of what is said far back: the tasks of RULER and MQAR, by generation, with 95 % intervals.

Decoders answer by generating, greedily. Encoders answer by retrieval: which of many long documents has a sentence?
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import GenerationConfig, PreTrainedModel

from ..data.recall_prompts import PROMPT_FUNCTIONS, Prompt, PromptMaker, check_positions, documents_with_a_needle
from ..data.text import pad_token, padded_batches
from ..integration.cache_argument import cache_argument, output_cache
from ..integration.packing import restarting_mixer
from ..utils.models import evaluation_mode
from ..utils.options import check_argument
from .embedding import sentence_embeddings
from .metric import Metric, Numbers, Score

#: The task of encoders: which of many documents has a sentence.
RETRIEVAL = "retrieval"

#: Standard deviations on either side of the mean that hold 95 % of a normal distribution.
Z95 = 1.959964


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many independent trials (Wilson 1927).

    `(p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n)` with z = 1.96. Of a mean of scores between 0 and 1, whose
    variance is at most p (1 - p), it is an interval that is rather too wide.
    """
    square = Z95**2 / count
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = ((share + square / 2 + sign * half) / (1 + square) for sign in (-1, 1))
    return max(min(low, share), 0.0), min(max(high, share), 1.0)  # rounding may leave out a share of 0 or 1


@dataclass(frozen=True, repr=False)
class Recall:
    """What a model recalled.

    Attributes:
        table: One row per prompt: `task`, `length` (tokens of the prompt), `depth` (0: the beginning, 1: the end; NaN
            where the answer is said in several places), `distance` (tokens from where the answer was first said to
            where it is due), `trial`, `score` (the share of the expected answers that were generated), `correct` (all
            of them).
        prompts: What identifies the prompts.
    """

    table: pd.DataFrame
    prompts: str = ""

    def summary(self, by: Sequence[str] = ("task", "length")) -> pd.DataFrame:
        """Return a row for each task and length: `prompts`, the mean `score`, and `low` and `high`, its 95 % interval.

        Args:
            by: Other columns of the table to group by, such as `("task", "depth")`.
        """
        rows = self.table.groupby(list(by), sort=False, dropna=False)["score"].agg(prompts="size", score="mean")
        rows[["low", "high"]] = [wilson_interval(row.score, row.prompts) for row in rows.itertuples()]
        return rows

    def against(self, other: Recall) -> pd.DataFrame:
        """Return, by task and length, the prompts with the better score (`wins`), as good (`ties`), worse (`losses`).

        Raises:
            ValueError: The other one answered other prompts.
        """
        keys = ["task", "length", "depth", "trial"]
        if self.prompts != other.prompts or not self.table[keys].equals(other.table[keys]):
            raise ValueError("against: both must have answered the same prompts. Measure with the same arguments.")
        difference = self.table["score"] - other.table["score"]
        rows = self.table[["task", "length"]].assign(wins=difference > 0, ties=difference == 0, losses=difference < 0)
        return rows.groupby(["task", "length"], sort=False).sum()

    def _text(self) -> pd.DataFrame:
        summary = self.summary()
        cells = [f"{row.score:.2f} [{row.low:.2f}, {row.high:.2f}]" for row in summary.itertuples()]
        return summary.assign(cells=cells)["cells"].unstack(sort=False).fillna("–")

    def __repr__(self) -> str:
        prompts = self.summary()["prompts"].min()
        return f"score by task and length, with its 95 % interval, of {prompts} prompts or more\n{self._text()}"

    def _repr_html_(self) -> str:
        return str(self._text().to_html())


def measure_recall(
    model: Any,
    tokenizer: Any,
    *,
    tasks: Sequence[str] | None = None,
    lengths: Sequence[int] = (512, 1024, 2048),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    trials: int = 8,
    batch_size: int = 4,
    seed: int = 0,
) -> Recall:
    """Measure what a model recalls of long inputs, by length and depth.

    Decoders (all that can generate) answer the prompts of `PROMPT_FUNCTIONS` greedily: those of RULER (Hsieh et al.
    2024, arXiv:2404.06654), `niah_single_1` to `_3`, `niah_multikey_1` to `_3`, `niah_multivalue`, `niah_multiquery`
    and `vt`, and `mqar`, the value of a key among random pairs (Arora et al. 2023, arXiv:2312.04927). An answer's score
    is the share of the expected strings that it contains. Where RULER has essays there are docstrings of Python's
    standard library, so that prompts are made offline; they are the same whatever else is measured. The questions about
    one text (`niah_multikey`, `mqar`: one for each depth) share one pass over it.

    Encoders get the task `retrieval`: each of `trials` documents has another sentence at the same depth, and the
    sentence itself must be most similar to its document, by the cosine of the embeddings. Chance is `1 / trials`, so
    give at least 16. Embeddings are mean-pooled, or those of a `SentenceTransformer`.

    Args:
        model: A decoder, an encoder, or a `SentenceTransformer`; with exact or with linear attention.
        tokenizer: Its tokenizer.
        tasks: Names of `PROMPT_FUNCTIONS`; None: all of them.
        lengths: Tokens of a prompt or document.
        depths: Where the answer is said, from 0 (the beginning) to 1 (the end). Tasks whose answer is said in several
            places have as many prompts.
        trials: Prompts for each length and depth; of encoders, documents. 96 prompts of a task and length, such as 32
            trials at three depths, give an interval of ± 10 points or less.
        batch_size: Prompts in one call.
        seed: Seed of the prompts.

    Raises:
        NotImplementedError: The model is an encoder-decoder.
        ValueError: An unknown task, numbers out of range, a length without room for the question or beyond a table of
            positions, or too few tokens in the vocabulary.
    """
    # A `SentenceTransformer` generates nothing; its config is that of a collection of modules.
    config = model.config if hasattr(model, "can_generate") else None
    if config is not None and config.is_encoder_decoder:
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder: give a decoder or an encoder.")
    decoder = config is not None and model.can_generate()
    possible = tuple(PROMPT_FUNCTIONS) if decoder else (RETRIEVAL,)
    chosen = (tasks,) if isinstance(tasks, str) else tuple(tasks or possible)
    for task in chosen:
        if task not in possible:
            raise ValueError(f"tasks: {task!r} is none of {', '.join(possible)}, which this model can answer.")
    if not lengths or not depths:
        raise ValueError(f"lengths and depths must not be empty, got {lengths} and {depths}.")
    check_argument("trials", trials, int, least=1)
    check_argument("batch_size", batch_size, int, least=1)
    for depth in depths:
        check_argument("depths", depth, float, least=0, most=1)
    maker = PromptMaker(tokenizer, None if config is None else config.get_text_config().vocab_size)
    cells = [*itertools.product(chosen, lengths)]
    rows: list[dict[str, Any]] = []
    identity = hashlib.sha256()
    for task, length in cells:
        cell = {"task": task, "length": length}
        if decoder:
            prompts = _prompts(maker, task, length, depths, trials, seed)
            check_positions(model, max(length + prompt.new_tokens for prompt in prompts))
            outputs = generate_answers(model, prompts, batch_size, pad_token(tokenizer))
            scores = [maker.score(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        else:
            check_positions(model, length)
            prompts, scores = _retrieve(model, maker, length, depths, trials, batch_size, seed)
        for index, (prompt, score) in enumerate(zip(prompts, scores, strict=True)):
            row = {"depth": prompt.depth, "distance": length - min(prompt.positions), "trial": index // len(depths)}
            rows.append({**cell, **row, "score": score, "correct": score == 1})
        identity.update(repr([prompt.ids for prompt in prompts]).encode())
    return Recall(pd.DataFrame(rows), identity.hexdigest())


def _prompts(
    maker: PromptMaker, task: str, length: int, depths: Sequence[float], trials: int, seed: int
) -> list[Prompt]:
    make = PROMPT_FUNCTIONS[task]
    generators = (random.Random(f"{seed} {task} {length} {trial}") for trial in range(trials))
    try:
        return [*itertools.chain.from_iterable(make(maker, generator, length, depths) for generator in generators)]
    except ValueError as error:  # callers know the length by different names, and measure several tasks
        raise ValueError(f"Recall by {task} cannot be measured. {error}") from None


def generate_answers(model: Any, prompts: Sequence[Prompt], batch_size: int, pad: int) -> Iterator[list[int]]:
    """Yield the greedy answer to each prompt, whatever the model's generation config says.

    Prompts that follow each other and share a text are answered after one pass over it, unless a part of the model
    (Jamba's Mamba) would begin anew after it.
    """
    shares = not restarting_mixer(model)
    groups = [list(group) for _, group in itertools.groupby(prompts, key=lambda prompt: prompt.ids[: prompt.shared])]
    for start in range(0, len(groups), batch_size):
        part = groups[start : start + batch_size]
        cache = None
        if len(part[0]) > 1 and shares:
            shared = min(group[0].shared for group in part)
            with torch.no_grad(), evaluation_mode(model):
                ids = torch.tensor([group[0].ids[:shared] for group in part], device=model.device)
                cache = output_cache(model.base_model(ids, use_cache=True))
        answers = []
        for question in zip(*part, strict=True):
            ids = torch.tensor([prompt.ids for prompt in question], device=model.device)
            count = max(prompt.new_tokens for prompt in question)
            output = generate_greedily(model, ids, count, pad, cache=copy.deepcopy(cache))
            new = output[:, ids.shape[1] :].tolist()
            answers.append([row[: prompt.new_tokens] for row, prompt in zip(new, question, strict=True)])
        yield from itertools.chain.from_iterable(zip(*answers, strict=True))


def generate_greedily(model: Any, ids: Tensor, count: int, pad: int, *, cache: Any = None) -> Tensor:
    """Return `ids [B, L]` with up to `count` more tokens, which are the likeliest ones at each step.

    Args:
        model: A decoder.
        ids: Tokens without padding.
        count: Number of new tokens.
        pad: Token after the end of a shorter answer.
        cache: The cache after the first tokens of `ids`; None: all are read.
    """
    base = model.generation_config
    options = {} if cache is None else cache_argument(model, cache)
    # An argument of `generate` would be completed by the model's own, such as a penalty on repetitions.
    model.generation_config = GenerationConfig(max_new_tokens=count, pad_token_id=pad, eos_token_id=base.eos_token_id)
    try:
        with evaluation_mode(model):
            output: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        model.generation_config = base
    return output


def _retrieve(
    model: Any, maker: PromptMaker, length: int, depths: Sequence[float], count: int, batch_size: int, seed: int
) -> tuple[list[Prompt], list[float]]:
    """Documents with a sentence each, and whether the most similar document of a sentence is its own."""
    pad = pad_token(maker.tokenizer)
    columns = []
    for depth in depths:
        rng = random.Random(f"{seed} {RETRIEVAL} {length} {depth}")
        prompts, sentences = documents_with_a_needle(maker, rng, length, depth, count)
        rows = [prompt.ids for prompt in prompts], [[*maker.before, *ids, *maker.after] for ids in sentences]
        embedded = [_embed(model, padded_batches(part, batch_size, pad)) for part in rows]
        # What all documents share says nothing about which of them it is.
        documents, questions = (normalize(part - part.mean(dim=0), dim=-1) for part in embedded)
        nearest = (questions @ documents.T).argmax(dim=1).cpu()
        columns.append(zip(prompts, (nearest == torch.arange(count)).double().tolist(), strict=True))
    pairs = [*itertools.chain.from_iterable(zip(*columns, strict=True))]
    return [prompt for prompt, _ in pairs], [score for _, score in pairs]


@torch.no_grad()
def _embed(model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    if isinstance(model, PreTrainedModel):
        return sentence_embeddings(model, batches)
    with evaluation_mode(model):
        inputs = [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches]
        return torch.cat([model(batch)["sentence_embedding"].float().cpu() for batch in inputs])


class RecallMetric(Metric):
    """What a model recalls: the mean score of all prompts, and that of each task and length (`niah_single_1 at 512`).

    Args:
        tokenizer: The model's tokenizer.
        lengths: Tokens of the prompts or documents.
        tasks: Names of `PROMPT_FUNCTIONS`, or `retrieval` for encoders.
        trials: Prompts of each task, length and depth; of encoders, documents.
        seed: Seed of the prompts.
    """

    def __init__(
        self, tokenizer: Any, lengths: Sequence[int], tasks: Sequence[str], *, trials: int = 8, seed: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.lengths = tuple(lengths)
        self.tasks = tuple(tasks)
        self.trials, self.seed = trials, seed
        self.score = Score("recall", "recall", "recall", digits=2)

    def check(self, model: PreTrainedModel) -> None:
        """Raise a ValueError, before anything is measured, if the model cannot take such prompts."""
        maker, added = PromptMaker(self.tokenizer, model.config.vocab_size), 0
        for task in self.tasks:
            if task != RETRIEVAL:
                (prompt,) = _prompts(maker, task, min(self.lengths), (0.5,), 1, self.seed)
                added = max(added, prompt.new_tokens)
        check_positions(model, max(self.lengths) + added)

    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure a decoder or an encoder, as `measure_recall`."""
        options: dict[str, Any] = {"tasks": self.tasks, "lengths": self.lengths, "trials": self.trials}
        recall = measure_recall(model, self.tokenizer, **options, seed=self.seed)
        score, count = float(recall.table["score"].mean()), len(recall.table)
        low, high = wilson_interval(score, count)
        values = {"recall": score, "recall_stderr": (high - low) / 2 / Z95, "low": low, "high": high, "rows": count}
        values["longest_input"] = max(self.lengths)
        for (task, length), row in recall.summary().iterrows():
            values[f"{task} at {length}"] = float(row["score"])
        return values
