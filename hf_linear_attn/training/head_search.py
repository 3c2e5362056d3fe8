"""Which key-value heads of a model stay exact: those that look something up, and those that the outputs need most."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import DEFAULT_ATTENTION, LayerConfig
from ..data.recall_prompts import PROMPT_FUNCTIONS, PromptMaker, check_positions
from ..data.text import text_rows
from ..integration.context import is_patched
from ..integration.discovery import longest_input, patched_modules, self_attention
from ..integration.exact import AttentionCall, observe_attention
from ..mechanisms.softmax import EXACT
from ..patching import patch_model
from ..registry import ATTENTIONS, seed_options
from ..utils.models import Batch, frozen, leading_batches, model_inputs, shared_copy
from ..utils.options import check_argument
from .calibration import CALIBRATION_TOKENS, calibrate_batches
from .losses import exact_outputs, model_losses
from .transfer import exact_length, longest_row

#: Share of the exact heads that a probe of recall chooses in a decoder; text chooses the others. SmolLM2-135M, 18 of 90
#: heads exact, `window` of 384: untrained, perplexity at 2,048 tokens is 5.5 % behind exact attention with all heads by
#: the probe, 1.9 % with three quarters and 1.1 % with half of them. Distilled, the latter two are 1.2 % and .9 % behind
#: and find 18 and 17 of 18 pass keys.
RETRIEVAL_SHARE = 0.75

#: Tokens of text that rank heads, and the fewest of a prompt of the probe, where the model takes so many.
SEARCH_TOKENS, PROBE_LENGTH = 16_384, 512

#: The task of the probe, and the tokens of its answer at most: a space and a number of seven digits.
PROBE_TASK, ANSWER_TOKENS = "niah_single_1", 8

#: Tokens of a row of text where no length is given.
ROW_LENGTH = 1024


@dataclass(frozen=True, repr=False)
class ExactHeads:
    """The key-value heads of a model that are to stay exact.

    Attributes:
        table: One row per key-value head: `layer`, `head`, `score` (the share of the attention that falls on the answer
            of a prompt, of the best of its query heads), `gain` (see `find_exact_heads`), `chosen`. The chosen ones
            come first. Columns that were not measured are missing.
        heads: Layer -> its chosen heads.
        attention: The mechanism of the other heads, with its options.
    """

    table: pd.DataFrame
    heads: dict[int, tuple[int, ...]]
    attention: Mapping[str, Any]

    @classmethod
    def first_rows(cls, table: pd.DataFrame, count: int, attention: Mapping[str, Any] | None = None) -> ExactHeads:
        """Return the choice of the first `count` rows of a table; the attention is `DEFAULT_ATTENTION` by default."""
        table = table.drop(columns="chosen", errors="ignore").reset_index(drop=True)
        table["chosen"] = table.index < count
        heads = _heads_by_layer(table[:count])
        return cls(table, heads, {"attention": DEFAULT_ATTENTION} if attention is None else attention)

    def with_share(self, share: float, retrieval_share: float = RETRIEVAL_SHARE) -> ExactHeads:
        """Return the choice of another share of all heads, by the scores and gains that were measured for this one.

        Args:
            share: Share of all key-value heads to choose; 0: none, 1: all, else at least one and not all.
            retrieval_share: Share of these that the scores choose, where gains were measured, too.

        Raises:
            ValueError: The share is out of range.
        """
        if not 0 <= share <= 1 or not 0 <= retrieval_share <= 1:
            raise ValueError(f"share and retrieval_share must lie in 0 to 1, got {share} and {retrieval_share}.")
        table, first = self.table, 0
        count = max(1, round(share * len(table))) if share else 0
        if share < 1:
            count = min(count, len(table) - 1)
        if "score" in table:
            table = table.sort_values("score", ascending=False, kind="stable")
            first = round(retrieval_share * count)
        if "gain" in table:
            rest = table[first:].sort_values("gain", ascending=False, kind="stable")
            table = pd.concat([table[:first], rest])
        return self.first_rows(table, count, self.attention)

    def plan(self, attention: str | Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a plan for `patch_model`: the chosen heads exact, the others with this mechanism or their own.

        A layer of exact heads alone stores its cache as the others do.
        """
        sizes = self.table.groupby("layer").size()
        default = self.attention if attention is None else attention
        in_int8 = LayerConfig.parse(default).stores_int8
        exact = {"attention": EXACT, "cache_dtype": "int8"} if in_int8 else EXACT
        layers = {
            str(layer): exact if len(heads) == sizes[layer] else {"exact_heads": list(heads)}
            for layer, heads in self.heads.items()
        }
        return {"default": default if isinstance(default, str) else dict(default), **layers}

    def summary(self) -> pd.DataFrame:
        """Return a row for each layer: its exact heads, and how many heads it has."""
        sizes = self.table.groupby("layer").size().sort_index()
        exact = [", ".join(map(str, self.heads.get(layer, ()))) or "–" for layer in sizes.index]
        return pd.DataFrame({"exact heads": exact, "of": sizes.to_list()}, index=sizes.index)

    def __repr__(self) -> str:
        return self.summary().to_string()

    def _repr_html_(self) -> str:
        return self.summary().to_html()


@torch.no_grad()
def find_retrieval_heads(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    share: float = 0.2,
    length: int = PROBE_LENGTH,
    prompts: int = 6,
    seed: int = 0,
) -> ExactHeads:
    """Find the key-value heads of an exact decoder that look something up (Wu et al. 2024, arXiv:2404.15574).

    `score = max_h mean_i Σ_j w_ij`: prompts with a number in noise (`niah_single_1` of RULER), the queries i that
    predict its tokens, the keys j where it was said, the query heads h that share the key-value head. Only the weights
    of these queries are computed; the mask takes a byte for each pair of tokens.

    Args:
        model: A decoder with exact attention.
        tokenizer: Its tokenizer.
        share: Share of all key-value heads to choose.
        length: Tokens of a prompt.
        prompts: Number of prompts; their depths are spread evenly.
        seed: Seed of the prompts.

    Raises:
        ValueError: The model is patched, or numbers are out of range.
        NotImplementedError: Its attention is not causal, or does not go through the attention interface.
    """
    _check(model, share)
    check_argument("prompts", prompts, int, least=1)
    if not all(layer.causal for layer in self_attention(model)):
        raise NotImplementedError(f"{type(model).__name__} has bidirectional attention: it predicts no next token.")
    check_positions(model, length + ANSWER_TOKENS)
    maker = PromptMaker(tokenizer, model.config.vocab_size)
    # Any mechanism that serves all models will do, because what is observed runs exactly.
    probed = patch_model(shared_copy(model).eval(), "window")
    layers = {id(module): layer for layer, module in patched_modules(probed).items()}
    totals: dict[int, Any] = dict.fromkeys(layers.values(), 0.0)
    for number in range(prompts):
        generator = random.Random(f"{seed} {number}")
        depth = (number + 0.5) / prompts
        (prompt,) = PROMPT_FUNCTIONS[PROBE_TASK](maker, generator, length, [depth])
        ((start,), (answer,)) = prompt.positions, prompt.references
        count = len(answer)

        def observer(call: AttentionCall, start: int = start, count: int = count) -> None:
            answers = replace(call, query=call.query[:, :, -count:], allowed=call.allowed[:, :, -count:])
            weights = answers.exact_weights()
            score = weights[..., start : start + count].sum(dim=-1).mean(dim=(0, 2)).cpu()
            totals[layers[id(call.module)]] += score.view(call.key.shape[1], -1) / prompts

        with observe_attention(probed, observer):
            probed.base_model(torch.tensor([prompt.ids + answer[:-1]], device=model.device), use_cache=False)
    scores = heads_table({layer: total.amax(1) for layer, total in totals.items()}, "score")
    return ExactHeads.first_rows(scores, 0).with_share(share)


def find_exact_heads(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | Iterable[str] | Iterable[Batch],
    attention: str = DEFAULT_ATTENTION,
    *,
    share: float = 0.2,
    retrieval_share: float = RETRIEVAL_SHARE,
    length: int | None = None,
    seed: int = 0,
    **options: Any,
) -> ExactHeads:
    """Find the key-value heads that should stay exact when the others get a mechanism.

    In a decoder with a tokenizer, the first `retrieval_share` of them are those that look something up
    (`find_retrieval_heads`). The others are those with the greatest gain on text. With the output of each head
    `g o + (1 - g) ô`, o exact and ô linear, and g = 1 for the heads that are chosen already and 0 for all others,

        gain = -∂ D / ∂g,

    where D is the loss of the next tokens in a language model with `input_ids`, and otherwise the divergence of outputs
    from those of the exact model: of logits in nats (squared differences in regression), or `1 - cosine` of mean-pooled
    embeddings; the mean over all tokens or rows. The learned gates of DuoAttention (Xiao et al. 2024, arXiv:2410.10819)
    minimise such a divergence; here one backward pass ranks all heads at once. A batch costs some five forward passes;
    layers are checkpointed, for the sake of memory.

    Args:
        model: A model with exact attention, which is unchanged.
        tokenizer: Its tokenizer. None (with batches): all heads are chosen by their gain, none by the probe.
        text: A text or a list of documents, like the inputs that the model will read; or batches of such inputs, dicts
            of tensors `[B, L]`. Some 16,000 tokens of a text are read.
        attention: The mechanism of the other heads.
        share: Share of all key-value heads to choose.
        retrieval_share: Share of these that the probe chooses.
        length: Tokens of a row of text, and of a prompt of the probe. None: 1,024 tokens of text, or fewer where the
            model takes fewer; prompts as long as the longest row, and at least 512 tokens.
        seed: Seed of the prompts, and of the mechanism if it draws random features.
        options: Other options of the mechanism. What it would learn has the values that `calibrate` finds on the text.

    Raises:
        ValueError: The model is patched, there is no text, numbers are out of range, or the loss is not finite.
        TypeError: One batch instead of a list of them, or a text without a tokenizer.
        NotImplementedError: As in `patch_model`.
    """
    _check(model, share)
    if not 0 <= retrieval_share <= 1:
        raise ValueError(f"retrieval_share must lie in 0 to 1, got {retrieval_share}.")
    causal = all(layer.causal for layer in self_attention(model))
    batches = _text_batches(model, tokenizer, text, length, causal=causal)
    probed, chosen = None, dict[int, tuple[int, ...]]()
    if tokenizer is not None and causal and retrieval_share:
        tokens = _probe_length(model, batches) if length is None else length
        probed = find_retrieval_heads(model, tokenizer, share=share, length=tokens, seed=seed).table
        chosen = _heads_by_layer(probed[: round(retrieval_share * int(probed["chosen"].sum()))])
    options = seed_options(ATTENTIONS.get(attention), seed, options)
    gated = patch_model(shared_copy(model).eval(), attention, **options)
    limit = exact_length(gated)
    if max(map(longest_row, batches)) <= limit:
        reason = f"All rows have at most {limit} tokens, which the mechanism attends to exactly: gains say nothing."
        warnings.warn(f"{reason} Pass longer rows, or narrow what is exact.", stacklevel=2)
    else:
        calibrate_batches(gated, leading_batches(batches, CALIBRATION_TOKENS))
    heads = GatedHeads(gated)
    heads.gates = {
        layer: torch.tensor([float(head in chosen.get(layer, ())) for head in range(count)], requires_grad=True)
        for layer, count in heads.counts.items()
    }
    gain = heads_table(_gains(heads, batches), "gain")
    table = gain if probed is None else probed.merge(gain, on=["layer", "head"])
    return ExactHeads.first_rows(table, 0, {"attention": attention, **options}).with_share(share, retrieval_share)


def _gains(heads: GatedHeads, batches: Iterable[Batch]) -> dict[int, Tensor]:
    """Return the gains `[G]` of the heads of each layer (see `find_exact_heads`): one backward pass for each batch."""
    model = heads.model
    kind = heads.model.config.problem_type
    gains, measured = dict[int, Tensor](), 0
    with frozen(model):
        for batch in batches:
            inputs = model_inputs(model, batch)
            exact = exact_outputs(model, inputs)
            with torch.enable_grad(), heads.mixed():
                losses = model_losses(model(**inputs), inputs, exact, kind)
                gradients = torch.autograd.grad(losses.sum(), list(heads.gates.values()), allow_unused=True)
            measured += len(losses)
            for layer, gradient in zip(heads.gates, gradients, strict=True):
                if gradient is not None:  # the inputs go through this layer
                    gains[layer] = gains.get(layer, 0.0) - gradient
    if not measured or not all(total.isfinite().all() for total in gains.values()):
        problem = "No gain of a head is known: there is nothing to predict, or the loss is not finite."
        remedy = "Give batches with two real tokens or more, and a model without NaN or infinite weights."
        raise ValueError(f"{problem} {remedy}")
    return {layer: total / measured for layer, total in gains.items()}


class GatedHeads:
    """Gates of the key-value heads of a patched model: with 1 a head is exact, with 0 it has its mechanism.

    The layers of the model are checkpointed from now on, because all activations would not fit.

    Args:
        model: The patched model.

    Attributes:
        counts: Number of the key-value heads of each patched layer.
        gates: The gates `[G]` of layers; a layer without any is exact.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = patched_modules(model)
        self.model = model
        self._layers = {id(module): layer for layer, module in modules.items()}
        self.counts = {layer: module.linear_attention.shape.num_key_value_heads for layer, module in modules.items()}
        self.gates: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def mixed(self) -> AbstractContextManager[None]:
        """Context manager in which heads have outputs by their gates; gradients are to be computed inside of it."""
        return observe_attention(self.model, self._mix)

    def _mix(self, call: AttentionCall) -> Tensor | None:
        gates = self.gates.get(self._layers[id(call.module)])
        if gates is None:
            return None
        gate = gates.to(call.output).repeat_interleave(call.query.shape[1] // len(gates))[:, None, None]
        # Where all gates are 0, nothing flows back through the exact output.
        exact = call.output if gates.any() else call.output.detach()
        return gate * exact + (1 - gate) * call.linear_output()


def _text_batches(
    model: PreTrainedModel, tokenizer: Any, text: Any, length: int | None, *, causal: bool
) -> list[Batch]:
    """Return batches of one row each of a text or of documents; batches as they are."""
    if isinstance(text, Mapping):
        raise TypeError("text is one batch. Give a text, a list of documents, or a list of batches: [batch].")
    entries: list[Any] = [text] if isinstance(text, str) else list(text)
    if not entries:
        raise ValueError("There is no text to measure on: the list is empty.")
    if not isinstance(entries[0], str):
        return entries
    if tokenizer is None:
        raise TypeError("A text needs the model's tokenizer; without one, give batches of token ids.")
    limit = longest_input(model) or ROW_LENGTH
    size = min(length or ROW_LENGTH, limit)
    rows = text_rows(tokenizer, entries, size, max(SEARCH_TOKENS // size, 1), causal=causal)
    return [{"input_ids": torch.tensor([row], device=model.device)} for row in rows]


def _probe_length(model: PreTrainedModel, batches: Iterable[Batch]) -> int:
    longest = max(PROBE_LENGTH, *(batch.get("input_ids", batch.get("inputs_embeds")).shape[1] for batch in batches))
    return min(longest, (longest_input(model) or longest + ANSWER_TOKENS) - ANSWER_TOKENS)


def _check(model: PreTrainedModel, share: float) -> None:
    if is_patched(model):
        raise ValueError(f"This {type(model).__name__} is patched. Give the exact model.")
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in 0 to 1, got {share}, and above 0.")


def heads_table(values: Mapping[int, Tensor], column: str) -> pd.DataFrame:
    """Return a row for each head from the values `[G]` of each layer."""
    rows = []
    for layer, row in values.items():
        rows += [(layer, head, value) for head, value in enumerate(row.tolist())]
    return pd.DataFrame(rows, columns=["layer", "head", column])


def _heads_by_layer(rows: pd.DataFrame) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer in the rows of a table."""
    return {int(layer): tuple(sorted(map(int, heads))) for layer, heads in rows.groupby("layer")["head"]}
