"""Which heads should stay exact: ways to rank the heads of a decoder, by the recall that each share of them keeps."""

import random
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.recall_prompts import PROMPT_FUNCTIONS, PromptMaker
from hf_linear_attn.data.text import packed_rows
from hf_linear_attn.demo import resolve_model
from hf_linear_attn.measure.token_loss import TokenLoss, strided_windows
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.study.models import load_tokenizer
from hf_linear_attn.training.head_search import ExactHeads, GatedHeads, heads_table
from hf_linear_attn.training.options import TrainingRunConfig
from hf_linear_attn.utils.models import shared_copy

from .runner import Cell, Cells, Rows

#: The task of the probes that answer gain, ablation and gates look at, and of the prompts that recall is measured with.
TASK = "niah_multikey_1"

#: Depths of the needles of a text.
DEPTHS = (0.125, 0.375, 0.625, 0.875)

#: Training of gates: learning rate, and the weight of the mean gate in the loss, which is in nats.
GATE_RATE, GATE_PENALTY = 0.05, 1.0


def gated_heads(exact: Any, window: int) -> GatedHeads:
    """Return the heads of a copy of a decoder: with a gate of 0 they have a window with sinks, and nothing beyond."""
    options: dict[str, Any] = {"window_size": window, "mix_init": CLOSED_MIX}
    return GatedHeads(hla.patch_model(shared_copy(exact).eval(), "window", **options))


def next_logits(heads: GatedHeads, ids: Tensor, count: int) -> Tensor:
    """Return the logits at the last `count` positions."""
    model: Any = heads.model
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=count).logits[0].float()
    return logits


def probes(maker: PromptMaker, length: int, seed: str) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield prompts with their answers, without end."""
    generator = random.Random(f"probe {seed}")
    while True:
        for prompt in PROMPT_FUNCTIONS[TASK](maker, generator, length, DEPTHS):
            (answer,) = prompt.references
            yield torch.tensor([prompt.ids + answer[:-1]]), answer


@torch.no_grad()
def ablation(heads: GatedHeads, maker: PromptMaker, length: int, count: int) -> pd.DataFrame:
    """Score each key-value head by how much the loss of answers grows if it alone has a window (arXiv:2602.11374)."""
    prompts = list(islice(probes(maker, length, "ablation"), count))

    def loss() -> float:
        losses = [cross_entropy(next_logits(heads, ids, len(answer)), torch.tensor(answer)) for ids, answer in prompts]
        return float(torch.stack(losses).mean())

    heads.gates, scores = {}, {layer: torch.zeros(number) for layer, number in heads.counts.items()}
    with heads.mixed():
        exact = loss()
        for layer, number in heads.counts.items():
            for head in range(number):
                heads.gates = {layer: (torch.arange(number) != head).float()}
                scores[layer][head] = loss() - exact
    return heads_table(scores, "score")


def answer_gain(heads: GatedHeads, maker: PromptMaker, length: int, count: int) -> pd.DataFrame:
    """Score each key-value head by what answers gain from it while all heads become exact together.

    `-E ∂L/∂g` over prompts, with the loss L of an answer and all gates at the same value, evenly spread from 0 to 1:
    integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365), whose sum is the loss that all heads win back.
    """
    scores = {layer: torch.zeros(number) for layer, number in heads.counts.items()}
    with heads.mixed():
        for number, (ids, answer) in enumerate(islice(probes(maker, length, "gain"), count)):
            value = (number + 0.5) / count
            heads.gates = {layer: torch.full_like(row, value, requires_grad=True) for layer, row in scores.items()}
            loss = cross_entropy(next_logits(heads, ids, len(answer)), torch.tensor(answer))
            gradients = torch.autograd.grad(loss, list(heads.gates.values()))
            for layer, gradient in zip(scores, gradients, strict=True):
                scores[layer] -= gradient / count
    return heads_table(scores, "score")


def joint_gates(heads: GatedHeads, maker: PromptMaker, length: int, steps: int) -> pd.DataFrame:
    """Score each key-value head by its gate, all of them trained together (Xiao et al. 2024, arXiv:2410.10819).

    The loss is the divergence from the exact model's next tokens in answers, and a penalty on the mean gate. Gates
    begin at 1 and stay within 0 and 1; the score is the mean over the second half of the steps.
    """
    gates = {layer: torch.ones(number, requires_grad=True) for layer, number in heads.counts.items()}
    optimizer = torch.optim.Adam(gates.values(), lr=GATE_RATE)
    means = {layer: torch.zeros(number) for layer, number in heads.counts.items()}
    first = steps // 2
    with heads.mixed():
        for step, (ids, answer) in enumerate(islice(probes(maker, length, "gates"), steps)):
            heads.gates = {}
            with torch.no_grad():
                exact = next_logits(heads, ids, len(answer)).log_softmax(-1)
            heads.gates = gates
            output = next_logits(heads, ids, len(answer)).log_softmax(-1)
            divergence = kl_div(output, exact, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            (divergence + GATE_PENALTY * torch.cat(list(gates.values())).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for layer, gate in gates.items():
                    means[layer] += gate.clamp_(0, 1) * (step >= first) / (steps - first)
    return heads_table(means, "score")


def exact_heads(
    model: str,
    dataset: str,
    text: str,
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2),
    ways: tuple[str, ...] = ("attention", "gain", "both", "answer gain", "ablation", "gates"),
    each_layer: tuple[str, ...] = ("both",),
    window: int = 384,
    length: int = 2048,
    trials: int = 12,
    seeds: tuple[int, ...] = (0,),
    rows: int = 4,
    probe_length: int = 1024,
    prompts: int = 8,
    steps: int = 40,
) -> Cells:
    """The recall that a decoder keeps with a share of its heads exact, by way of choosing them.

    The other heads have windows with sinks, and nothing beyond: nothing is trained. *attention*: the share of the
    attention that falls on an answer; *gain*: what the loss of text gains, to first order; *both*: three quarters by
    the former, the others by the latter, as `find_exact_heads` chooses; *answer gain*: what the loss of answers gains
    while all heads become exact; *ablation*: the loss of answers without the head alone; *gates*: gates of all heads,
    trained together on answers. In forward passes over a prompt, *answer gain* takes some five for each of its prompts,
    *ablation* one for each head and prompt, and *gates* some six for each step.

    Args:
        model: A decoder: folder, GGUF file or Hub name.
        dataset: Text file that heads are chosen on.
        text: Text file that the loss is measured on.
        shares: Shares of the key-value heads.
        ways: How to choose them.
        each_layer: Of these ways, those by which one head in each layer is chosen, beside as many heads anywhere.
        window: Tokens of the windows.
        length: Tokens of a prompt, of a row of text, and of the prompts and rows that *attention* and *gain* look at.
        trials: Texts for each seed, each with four questions.
        seeds: Seeds of the prompts.
        rows: Rows of text.
        probe_length: Tokens of the prompts that the last three ways look at.
        prompts: Prompts of the ablation; twice as many of the answer gain.
        steps: Steps of the training of gates.
    """
    exact = load_checkpoint(resolve_model(model)[0], AutoModelForCausalLM, dtype=torch.float32)[0].eval()
    exact.requires_grad_(False)
    tokenizer = load_tokenizer(TrainingRunConfig(model=model))
    maker = PromptMaker(tokenizer, exact.config.vocab_size)
    documents = text_documents(Path(dataset), "auto")
    test = packed_rows(tokenizer, text_documents(Path(text), "auto"), length)[:rows]
    windows: dict[str, Any] = {"attention": "window", "window_size": window, "mix_init": CLOSED_MIX}

    def search(retrieval_share: float) -> pd.DataFrame:
        options: dict[str, Any] = {"length": length, "retrieval_share": retrieval_share, **windows}
        return hla.find_exact_heads(exact, tokenizer, documents, **options).table

    rankings: dict[str, Callable[[], pd.DataFrame]] = {
        "attention": lambda: hla.find_retrieval_heads(exact, tokenizer, length=length).table,
        "gain": lambda: search(0.0),
        "both": lambda: search(0.75),
        "answer gain": lambda: answer_gain(gated_heads(exact, window), maker, probe_length, 2 * prompts),
        "ablation": lambda: ablation(gated_heads(exact, window), maker, probe_length, prompts),
        "gates": lambda: joint_gates(gated_heads(exact, window), maker, probe_length, steps),
    }
    for name, chosen, known in (("ways", ways, tuple(rankings)), ("each_layer", each_layer, ways)):
        if unknown := [way for way in chosen if way not in known]:
            raise ValueError(f"{name}: {unknown[0]!r} is none of {', '.join(known)}.")
    facts = {"model": Path(model).name}
    settings = {"length": length, "window": window, "chosen on": Path(dataset).name}
    probing = {"probe_length": probe_length, "prompts": prompts}
    depends = {"answer gain": probing, "ablation": probing, "gates": {"probe_length": probe_length, "steps": steps}}
    found: dict[str, pd.DataFrame] = {}

    def rank(way: str) -> Rows:
        started = time.perf_counter()
        table = rankings[way]().drop(columns="chosen", errors="ignore")
        return [{"seconds": time.perf_counter() - started, **row} for row in table.to_dict("records")]

    for way in ways:
        where = {**facts, "way": way, "share": None, "seed": None}
        ranked = yield Cell(where, partial(rank, way), {**settings, **depends.get(way, {})})
        found[way] = pd.DataFrame(ranked).filter(["layer", "head", "score", "gain"])

    @cache
    def patched(way: str, share: float, spread: bool) -> Any:
        if way == "exact":
            return exact
        heads = ExactHeads.first_rows(found[way], 0).with_share(1.0 if spread else share)
        if spread:  # the best of each layer come first
            order = heads.table.groupby("layer", sort=False).cumcount().argsort(kind="stable")
            heads = ExactHeads.first_rows(heads.table.iloc[order], round(share * len(order)))
        return hla.patch_model(shared_copy(exact), heads.plan(windows))

    def measure(way: str, share: float, spread: bool, seed: int) -> Rows:
        student = patched(way, share, spread)
        options: dict[str, Any] = {"tasks": [TASK], "lengths": [length], "depths": DEPTHS, "trials": trials}
        recall = hla.measure_recall(student, tokenizer, **options, batch_size=1, seed=seed)
        row: dict[str, Any] = {"scores": recall.table["score"].tolist()}
        if seed == seeds[0]:
            row["loss"] = TokenLoss(strided_windows(test, length, length - 1))(student)["loss"]
        return [row]

    each = 1 / exact.config.num_key_value_heads
    variants = [("exact", 1.0, False), *((way, share, False) for share in shares for way in ways)]
    variants += [(way, each, spread) for way in each_layer for spread in (False, True)]
    settings |= {"trials": trials, "text": Path(text).name, "rows": rows}
    for seed in seeds:
        for way, share, spread in variants:
            where = {**facts, "way": way, "share": share, "one in each layer": spread, "seed": seed}
            yield Cell(where, partial(measure, way, share, spread, seed), {**settings, **depends.get(way, {})})
