"""A start for the learned parts of a patched model in closed form, from rows of text and without any training step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import longest_input, patched_modules
from ..integration.exact import AttentionCall, observe_attention
from ..integration.install import is_untrained
from ..integration.models import check_patched
from ..integration.positions import check_max_length, rotary_buffers, rotary_frequencies
from ..mechanisms.base import AttentionInputs
from ..mechanisms.head_mixture import HeadMixture, linear_mechanism
from ..mechanisms.window import HybridAttention, WindowAttention, is_closed
from ..ops.terms import distances
from ..utils.models import Batch, evaluation_mode, leading_batches, model_inputs, refuse_single_batch
from .losses import query_block, query_ranges
from .sharding import is_sharded

#: Tokens that the start of an attention transfer, and of a search for exact heads, is calibrated on.
CALIBRATION_TOKENS = 8192

#: Longest input that a calibration has in mind by default, in tokens.
CALIBRATION_LENGTH = 8192

#: Tokens of the row whose keys tell how a layer rotates them, and how many positions later they are seen again.
ROTATED_TOKENS, ROTATED_BY = 64, 16

#: Distances at which the mean rotation of keys is taken.
DISTANCES = 512

#: Keys of a head that codes are fitted to, at most.
FITTED_KEYS = 8192

#: Queries that the biases of codes are fitted to, at most.
COUNTED_QUERIES = 2048

#: Draws of queries of each row whose attention is counted (see `losses.query_ranges`): up to 256 queries.
DRAWS = 4

#: Shares of attention closer than this to 0 or 1 have no finite mixing weight.
SMALLEST_SHARE = 1e-12

#: Steps that find the biases of codes, and the weight of their squares, for codes that no query looks at.
BIAS_STEPS, BIAS_DECAY = 40, 1e-7

#: How far bisection moves a log mixing weight at most, and its steps: to 1e-5.
MIX_RANGE, BISECTIONS = 20.0, 22


@dataclass(frozen=True, repr=False)
class Calibration:
    """What a calibration found.

    Attributes:
        table: A row for each query head of each layer with a linear part: `layer`, `head`, and the mean share of its
            attention outside of the exact part of the mechanism, in `exact` attention and as `calibrated`.
    """

    table: pd.DataFrame

    def within(self, factor: float = 2.0) -> float:
        """Return the share of heads whose attention outside is within a factor of that of exact attention."""
        exact, calibrated = (self.table[name].clip(lower=SMALLEST_SHARE) for name in ("exact", "calibrated"))
        ratio = calibrated / exact
        return float(((ratio <= factor) & (ratio >= 1 / factor)).mean())

    def __repr__(self) -> str:
        if not len(self.table):
            return "calibration: no layer has a part whose weight could be fitted"
        means = self.table.groupby("layer")[["exact", "calibrated"]].mean()
        title = "share of attention outside of the exact part, mean over heads"
        return f"{title}\n{means.to_string(float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        return self.table.to_html(float_format="{:.3f}".format, index=False)


@torch.no_grad()
def calibrate(model: PreTrainedModel, batches: Iterable[Batch], *, max_length: int | None = None) -> Calibration:
    """Fit the start of each patched layer to the model's own queries and keys, in place and without training.

    - The codes of `vq` maps: k-means on the keys of each key-value head, in encoders weighted by the attention that
      they get, and biases by which each code gets the share of the attention that its keys have.
    - The log mixing weight of an encoder's `window` with other maps: by bisection, so that the mean share of attention
      outside of window and sinks is that of exact attention, `mean_i Σ_{j outside} p_ij`, head by head. In a decoder
      an untrained map of the right weight makes the model much worse, so it is left as it is. What is closed
      (`is_closed`) stays closed.

    The model runs exactly, so that every layer sees the inputs that it was trained with: two passes over the batches
    for codes, one for mixing weights. Some thousand tokens of text like that to come are enough. What else mechanisms
    learn is unchanged. In a distributed run all processes get the result of the first.

    Rotary positions turn the keys, so that codes which are fitted to the first positions do harm at later ones. Rows
    that are shorter than `max_length` therefore stand at positions up to there, again and again if there are few. Of
    two coordinates that rotate by ω a position, codes distinguish what queries see of it on average, the part
    `|mean_Δ e^{iωΔ}|`, with Δ from the window's size to `max_length`, evenly in log Δ.

    Args:
        model: A patched model.
        batches: What the model is called with, as a tokenizer or a collator makes it: dicts of tensors `[B, L]`.
        max_length: The longest input to come, in tokens. Default: the model's limit, at most `CALIBRATION_LENGTH`, or
            the longest row where the model states none.

    Returns:
        The shares of attention in exact attention and after the calibration.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, `batches` is one batch alone, or `max_length` is no integer.
        ValueError: The model is not patched, there are no batches, they are no dicts of tensors, no row is longer than
            what is attended to exactly, or `max_length` is not positive.
    """
    check_patched(model)
    refuse_single_batch(batches)
    every = list(batches)
    if not every:
        raise ValueError("There are no batches to calibrate on.")
    for batch in every:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids", torch.empty(0)), Tensor):
            raise ValueError(
                f"batches has a {type(batch).__name__}. Pass dicts of tensors, as the tokenizer returns them: "
                '[tokenizer(texts, padding=True, return_tensors="pt")].'
            )
    if max_length is not None:
        check_max_length(max_length)
    result, could_fit = _fit(model, every, max_length)
    if could_fit and not len(result.table):
        exact = max(module.linear_attention.exact_length or 0 for module in patched_modules(model).values())
        raise ValueError(
            f"No row has a token outside of what is attended to exactly ({exact:,} tokens), so there is nothing to "
            "fit. Give longer rows, such as whole documents, or patch the model with a smaller window_size."
        )
    return result


@torch.no_grad()
def calibrate_batches(model: PreTrainedModel, batches: list[Batch]) -> Calibration:
    """Fit the start of each patched layer as `calibrate` does; rows that are too short for that change nothing."""
    return _fit(model, batches, None)[0]


def _fit(model: PreTrainedModel, batches: list[Batch], max_length: int | None) -> tuple[Calibration, bool]:
    """Return what `calibrate` does, and whether any layer has a part that longer rows could have been fitted to."""
    modules = patched_modules(model)
    layers = {id(module): _Layer(index, module.linear_attention) for index, module in modules.items()}
    fitted = {key: layer for key, layer in layers.items() if layer.fits_keys}
    mixed = {key: layer for key, layer in layers.items() if layer.has_mix}
    needs_head = model.config.is_encoder_decoder or is_sharded(model)
    backbone = model if needs_head else model.base_model  # the head and its logits are of no use here
    moved = batches
    if fitted and _can_be_moved(model, batches):
        longest = longest_input(model) or max(batch["input_ids"].shape[1] for batch in batches)
        max_length = max_length or min(longest, CALIBRATION_LENGTH)
        moved = _spread_positions(batches, max_length)
        damp = partial(_Layer.damp_rotation, model=model, max_length=max_length)
        _observe(backbone, _same_tokens_later(batches[0]), fitted, _Layer.collect_rotated, damp)
    _observe(backbone, moved, fitted, _Layer.collect_keys, _Layer.fit_keys)
    _observe(backbone, moved, fitted, _Layer.count_codes, _Layer.weigh_codes)
    _observe(backbone, batches, mixed, _Layer.count_outside, _Layer.mix)
    table = list(chain.from_iterable(layer.rows() for layer in layers.values()))
    if torch.distributed.is_initialized():
        for layer in layers.values():
            for parameter in layer.linear.parameters():
                torch.distributed.broadcast(parameter.data, 0)
    return Calibration(pd.DataFrame(table, columns=["layer", "head", "exact", "calibrated"])), bool(fitted or mixed)


def calibrate_untrained(model: PreTrainedModel, batches: Iterable[Batch]) -> None:
    """Calibrate a model of whose learned parts none has been trained, on the first of the batches.

    In a distributed run every process takes the batches of the first: a sharded model is called by all, equally often.
    """
    if not is_untrained(model):
        return
    chosen = leading_batches(batches, CALIBRATION_TOKENS)
    if torch.distributed.is_initialized():
        device = next(iter(chosen[0].values())).device
        shared = [[{name: tensor.cpu() for name, tensor in batch.items()} for batch in chosen]]
        torch.distributed.broadcast_object_list(shared, 0)
        chosen = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in shared[0]]
    calibrate_batches(model, chosen)


def _can_be_moved(model: PreTrainedModel, batches: list[Batch]) -> bool:
    """Return whether the model rotates its keys by positions that it takes as an argument."""
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    return takes_positions and bool(rotary_buffers(model)) and all("input_ids" in batch for batch in batches)


def _spread_positions(batches: list[Batch], limit: int) -> list[Batch]:
    """Let rows begin at later positions, up to where they end at the limit, and repeat them until they could fill it.

    The first begins at its own position; the beginnings are denser there, where all inputs have tokens.
    """
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    repeated = batches * max(-(-limit // tokens), 1)
    last = max(sum(len(batch["input_ids"]) for batch in repeated) - 1, 1)
    row = 0
    moved: list[Batch] = []
    for batch in repeated:
        ids = batch["input_ids"]
        rows = torch.arange(row, row + len(ids), device=ids.device)
        row += len(ids)
        starts = ((rows / last).square() * max(limit - ids.shape[1], 0)).long().unsqueeze(1)
        positions = batch.get("position_ids", torch.arange(ids.shape[1], device=ids.device))
        moved.append({**batch, "position_ids": positions + starts})
    return moved


def _same_tokens_later(batch: Batch) -> list[Batch]:
    """Return some tokens of a batch, and the same ones `ROTATED_BY` positions later."""
    ids = batch["input_ids"][:1, -ROTATED_TOKENS:]
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    return [{"input_ids": ids, "position_ids": positions + later} for later in (0, ROTATED_BY)]


def _observe(
    model: Any,
    batches: list[Batch],
    layers: Mapping[int, _Layer],
    count: Callable[[_Layer, AttentionCall], None],
    finish: Callable[[_Layer], None],
) -> None:
    """Run the model exactly; let some layers, by the ids of their modules, count their calls, and then finish."""
    if not layers:
        return

    def observer(call: AttentionCall) -> None:
        if id(call.module) in layers:
            count(layers[id(call.module)], call)

    with evaluation_mode(model), observe_attention(model, observer):
        for batch in batches:
            model(**model_inputs(model, batch))
    for layer in layers.values():
        finish(layer)


class _CodeWeights(NamedTuple):
    """What some queries give to the codes of a map; everything is relative to the exact normaliser of the query."""

    #: The shares of codes in exact attention `[H, n, m]`.
    exact: Tensor
    #: The log weights of codes by the map `[H, n, m]`.
    implied: Tensor
    #: The log weights of the exact part `[H, n]`.
    inside: Tensor


class _Layer:
    """A patched layer with what has been counted of its calls."""

    def __init__(self, index: int, mechanism: Any) -> None:
        self.index, self.mechanism = index, mechanism
        self.linear: Any = linear_mechanism(mechanism)
        self.map: Any = self.linear.feature_map
        self.fits_keys = self.map is not None and self.map.fits_keys
        self.window_size = self.linear.options.window_size if isinstance(self.linear, HybridAttention) else 1
        mixes = isinstance(self.linear, WindowAttention)
        self.has_mix = mixes and not self.fits_keys and not self.linear.shape.causal
        self.rotated: list[Tensor] = []  # keys of the same tokens at two positions, `[G, n, d]`
        self.damping: Tensor | None = None  # `[d]`
        self.keys: list[Tensor] = []  # `[G, n, d]`
        self.queries: list[Tensor] = []  # `[G, n, d]`
        self.importance: list[Tensor] = []  # of keys, `[G, n]`
        self.codes: list[_CodeWeights] = []  # of drawn queries
        self.exact_shares: list[Tensor] = []  # `[H, n]`
        self.logits: list[Tensor] = []  # `[H, n]`, of the share of the linear part
        self.calibrated: Tensor | None = None  # `[H, n]`

    def _heads(self, tensor: Tensor) -> Tensor:
        """Return the heads of `[B, H | G, L, x]` that are not exact."""
        if isinstance(self.mechanism, HeadMixture):
            return self.mechanism.linear_heads(tensor)
        return tensor

    def _inputs(self, call: AttentionCall) -> AttentionInputs:
        """Return the inputs of the heads that are not exact."""
        inputs = call.inputs()
        if isinstance(self.mechanism, HeadMixture):
            return self.mechanism.linear_inputs(inputs)
        return inputs

    def _outside(self, call: AttentionCall) -> Tensor:
        """Return which keys the feature map weighs, `[B, H, L, S]`; none for the queries of padding."""
        outside = call.outside()
        allowed = call.allowed if outside is None else outside
        return self._heads(allowed & call.real_queries().unsqueeze(-1))

    def _blocks(self, call: AttentionCall, row: int) -> Iterator[AttentionCall]:
        ranges = set[tuple[int, int]]()
        for seed in range(DRAWS):
            ranges.update((start, stop) for start, stop, _ in query_ranges(call, seed))
        for start, stop in sorted(ranges):
            yield query_block(call, slice(row, row + 1), start, stop)

    def collect_rotated(self, call: AttentionCall) -> None:
        self.rotated.append(call.key[0].float())

    def damp_rotation(self, model: PreTrainedModel, max_length: int) -> None:
        """Find what is left of each coordinate of a rotated key, on average over the distances to come."""
        if not self.rotated:
            return
        before, later = self.rotated
        self.rotated = []
        if (frequencies := rotary_frequencies(model, before, later, ROTATED_BY)) is not None:
            ends = math.log(self.window_size), math.log(max(max_length, self.window_size))
            angles = torch.linspace(*ends, DISTANCES, device="cpu").exp().outer(frequencies.cpu())
            self.damping = torch.polar(torch.ones_like(angles), angles).mean(dim=0).abs()

    def collect_keys(self, call: AttentionCall) -> None:
        """Keep the keys that a query weighs by the map, and the queries."""
        outside = self._outside(call).any(dim=1)
        for row, (queries, keys) in enumerate(zip(outside.any(dim=2), outside.any(dim=1), strict=True)):
            key = self._heads(call.key[row : row + 1])[0]
            query = self._heads(call.query[row : row + 1])[0]
            self.keys.append(key[:, keys].float())
            self.queries.append(query[:, queries].float().reshape(len(key), -1, query.shape[-1]))
            self.importance.append(self._importance(call, row)[:, keys])

    def _importance(self, call: AttentionCall, row: int) -> Tensor:
        """Return the attention of drawn queries that each key of a row gets by the map, `[G, S]`; in decoders ones."""
        _, heads, keys, _ = self._heads(call.key).shape
        if call.causal:
            return torch.ones(heads, keys, device=call.key.device)
        received = torch.zeros(heads, keys, device=call.key.device)
        for block in self._blocks(call, row):
            weights = self._heads(block.exact_weights())[0].float() * self._outside(block)[0]
            received += weights.unflatten(0, (heads, -1)).sum(dim=(1, 2))
        return received

    def fit_keys(self) -> None:
        if any(keys.numel() for keys in self.keys):
            parts = (self.keys, self.queries, self.importance)
            keys, queries, importance = (torch.cat(rows, dim=1) for rows in parts)
            self.keys, self.queries, self.importance = [], [], []
            every = slice(None, None, -(-keys.shape[1] // FITTED_KEYS))
            self.map.fit(keys[:, every], queries, self.damping, importance[:, every])

    def count_codes(self, call: AttentionCall) -> None:
        """Keep what drawn queries give to each code by the map, and what it gets in exact attention."""
        repeats = self.linear.shape.num_heads // self.linear.shape.num_key_value_heads
        for row in range(call.query.shape[0]):
            key = self._heads(call.key[row : row + 1]).float()
            codes = self.map.key(key, call.scaling).values
            key, codes = (part.repeat_interleave(repeats, dim=1) for part in (key, codes))
            for block in self._blocks(call, row):
                keys = block.key.shape[2]
                self.codes.append(self._code_weights(block, key[:, :, :keys], codes[:, :, :keys]))

    def _code_weights(self, call: AttentionCall, key: Tensor, codes: Tensor) -> _CodeWeights:
        """Return the weights of codes for queries of one row, given its keys and their codes, `[1, H, S, d | m]`."""
        outside = self._outside(call)
        counted = outside.any(dim=-1)[0, 0]
        outside = outside[:, :, counted].to(key)
        query = self._heads(call.query)[:, :, counted].float()
        logits, sink, factors = self._logits(call, query * call.scaling, key, counted)
        logits = logits.masked_fill(~call.allowed[:, :, counted], float("-inf"))
        normaliser = torch.cat([logits, sink], dim=-1).logsumexp(dim=-1, keepdim=True)
        exact = ((logits - normaliser).exp() * outside) @ codes
        near = torch.cat([logits.masked_fill(outside.bool(), float("-inf")), sink], dim=-1)
        inside = near.logsumexp(dim=-1) - normaliser.squeeze(-1)
        features, log_scale = self.map.query(query.double(), call.scaling)  # in float32 the smallest would be zero
        implied = (features.log() + log_scale.unsqueeze(-1)).float() - normaliser
        implied = implied + ((factors * outside) @ codes).log()
        if isinstance(self.linear, WindowAttention):
            implied = implied + self.linear.added_mix(self._inputs(call))[:, :, counted].unsqueeze(-1).float()
        return _CodeWeights(exact[0], implied[0], inside[0])

    def _logits(
        self, call: AttentionCall, scaled: Tensor, key: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return the logits `[1, H, n, S]` of scaled queries, that of the model's sink, and the factors of far keys."""
        logits = scaled @ key.transpose(-1, -2)
        sink = torch.full_like(logits[..., :1], float("-inf"))
        terms = self._inputs(call).terms
        if not terms:
            return logits, sink, 1.0
        distance = distances(call.query.shape[2], key.shape[2], call.start, key.device)[counted]
        logits = terms.applied(logits, distance) + terms.of_pairs(scaled, key, distance)
        if terms.sink is not None:
            sink = terms.sink.float()[:, None, None].expand_as(sink)
        return logits, sink, terms.far_factors(scaled, key, distance, self.window_size)

    def weigh_codes(self) -> None:
        """Find the biases with the least mean divergence of exact from implied weights, both summed by code.

        This is a convex problem, and at its solution each code gets as much attention as its keys have.
        """
        count = sum(exact.shape[1] for exact, *_ in self.codes)
        if not count:
            return
        every = -(-count // COUNTED_QUERIES)
        exact, implied, inside = (torch.cat(parts, dim=1)[:, ::every] for parts in zip(*self.codes, strict=True))
        bias = torch.zeros_like(exact[:, 0], requires_grad=True)
        expected = exact.mean(dim=1)
        optimizer = torch.optim.LBFGS([bias], max_iter=BIAS_STEPS, line_search_fn="strong_wolfe")

        def divergence() -> Tensor:
            optimizer.zero_grad()
            total = torch.logaddexp((implied + bias.unsqueeze(1)).logsumexp(dim=2), inside)
            value = total.mean(dim=1).sum() - (expected * bias).sum() + BIAS_DECAY * bias.square().sum()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(divergence)
        bias = bias.detach()
        shares = exact.sum(dim=2)
        logits = (implied + bias.unsqueeze(1)).logsumexp(dim=2) - inside
        shift = _shift(logits, shares)
        self.map.weigh(bias + shift.unsqueeze(1))
        if isinstance(self.linear, WindowAttention):
            self._set_mix(torch.zeros_like(self.linear.log_mix))
        self.exact_shares = [shares]
        self.calibrated = (logits + shift.unsqueeze(1)).sigmoid()
        self.codes = []

    def count_outside(self, call: AttentionCall) -> None:
        """Keep the shares of attention outside of the exact part, of drawn queries."""
        for block in chain.from_iterable(self._blocks(call, row) for row in range(call.query.shape[0])):
            outside = self._outside(block)
            counted = outside.any(dim=-1)[0, 0]
            exact, implied = (
                (self._heads(weights) * outside).sum(dim=-1)[0][:, counted].float()
                for weights in (block.exact_weights(), block.linear_weights())
            )
            self.exact_shares.append(exact)
            self.logits.append(implied.double().logit(eps=SMALLEST_SHARE))

    def mix(self) -> None:
        """Shift the log mixing weights by bisection."""
        if not self.logits:
            return
        logits = torch.cat(self.logits, dim=1)
        shift = _shift(logits, torch.cat(self.exact_shares, dim=1))
        self._set_mix(self.linear.log_mix + shift.to(self.linear.log_mix))
        self.calibrated = (logits + shift.unsqueeze(1)).sigmoid()

    def _set_mix(self, log_mix: Tensor) -> None:
        """Set the log mixing weights, but of the heads whose part outside is closed."""
        self.linear.log_mix.copy_(torch.where(is_closed(self.linear.log_mix), self.linear.log_mix, log_mix))

    def rows(self) -> Iterator[tuple[int, int, float, float]]:
        """The layer's part of the table."""
        if self.calibrated is None or not self.calibrated.shape[1]:
            return
        exact = torch.cat(self.exact_shares, dim=1).mean(dim=1).tolist()
        for head, values in enumerate(zip(exact, self.calibrated.mean(dim=1).tolist(), strict=True)):
            yield self.index, head, *values


def _shift(logits: Tensor, exact: Tensor) -> Tensor:
    """Return by how much to shift logits of shares `[H, n]`, so that their means are those of exact shares: `[H]`."""
    expected = exact.mean(dim=1)
    low = torch.full_like(expected, -MIX_RANGE)
    high = torch.full_like(expected, MIX_RANGE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = (logits + middle.unsqueeze(1)).sigmoid().mean(dim=1) > expected
        low = torch.where(above, low, middle)
        high = torch.where(above, middle, high)
    return torch.where(logits.isinf().all(dim=1), 0.0, (low + high) / 2)
