"""Speed of a whole model and of one attention layer against its exact form, in the same run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..integration.attention import SUBMODULE
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..mechanisms.base import AttentionInputs, LinearAttention
from .resources import count_flops, peak_memory
from .timing import SpeedTable, Timing, interleaved

#: The name of the row that shows what a model costs without any attention.
FREE = "no attention"
FREE_IMPLEMENTATION = "hf_linear_attn_free"

#: Seconds that one length may take in any case, even with a small budget: without long inputs there is little to see.
LONGEST_WAIT = 60.0

Announce = Callable[[int, str], None]
"""Called with the number of lengths done and a note."""

Pass = Callable[[Mapping[str, Tensor]], object]
"""Runs a model once on inputs."""


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that can be patched by itself; weights and buffers are the same tensors, not copies of them."""
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose attention hands each token its own value: what the rest of the model costs, and does."""
    AttentionInterface.register(FREE_IMPLEMENTATION, _own_value)
    AttentionMaskInterface.register(FREE_IMPLEMENTATION, _no_mask)
    free = shared_copy(model)
    free.set_attn_implementation(FREE_IMPLEMENTATION)
    return free


def _own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    own = value[:, :, -query.shape[2] :].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return own.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


# --------------------------------------------------------------------------------------------------------------------
# Inputs of any length


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether positions are looked up in a table of limited size (rotary positions are computed, and go on)."""
    config = model.config.get_text_config(decoder=False)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return not rotary and longest_input(model) is not None


def can_go_beyond(model: PreTrainedModel) -> bool:
    """Whether `long_inputs` can make inputs longer than the model's positions."""
    return not has_position_table(model) or "position_ids" in inspect.signature(model.forward).parameters


def long_inputs(model: PreTrainedModel, tokens: Sequence[int], length: int, batch: int = 1) -> dict[str, Tensor]:
    """`[batch, length]` inputs: the tokens, row after row, repeated as needed. Positions past the model's table begin
    again from zero.

    The values change nothing about the speed; the outputs at such lengths mean nothing and are not used.
    """
    wanted = batch * length
    repeated = (list(tokens) * (wanted // len(tokens) + 1))[:wanted]
    ids = torch.tensor(repeated, device=model.device).view(batch, length)
    # A mask of ones: position ids that begin again would otherwise be read as several packed documents.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    accepted = inspect.signature(model.forward).parameters
    inputs.update({name: places.expand(batch, -1) for name, places in position_inputs(model, length).items()})
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", None):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def position_inputs(model: PreTrainedModel, length: int, start: int = 0) -> dict[str, Tensor]:
    """`position_ids [1, length]` that begin again from zero where the model's table ends; nothing if it does not."""
    limit = longest_input(model)
    if limit is None or start + length <= limit or not has_position_table(model):
        return {}
    return {"position_ids": torch.arange(start, start + length, device=model.device)[None] % limit}


def timing_options(
    options: Mapping[str, Any], accepted: Sequence[str], limit: int | None, longest: int
) -> dict[str, Any]:
    """The options of a copy that is timed up to `longest` tokens: a mechanism that is built for a largest length gets
    that one where the model's own limit is smaller."""
    if "max_length" in accepted and (limit is None or longest > limit):
        return {**options, "max_length": longest}
    return dict(options)


# --------------------------------------------------------------------------------------------------------------------
# Measuring


@torch.inference_mode()
def model_speed(
    models: Mapping[str, PreTrainedModel],
    tokens: Sequence[int],
    lengths: Sequence[int],
    *,
    baseline: str,
    budget: float,
    announce: Announce,
) -> SpeedTable:
    """Time one forward pass (batch 1) of each model at each length. budget: seconds for each length."""
    forward = {name: forward_of(model) for name, model in models.items()}

    def prepare(length: int) -> dict[str, Callable[[], object]]:
        inputs = long_inputs(models[baseline], tokens, length)
        return {name: lambda call=call: call(inputs) for name, call in forward.items()}  # type: ignore[misc]

    device = models[baseline].device
    return _sweep(prepare, lengths, baseline=baseline, budget=budget, device=device, announce=announce)


def length_rows(
    models: Mapping[str, PreTrainedModel],
    tokens: Sequence[int],
    length: int,
    *,
    baseline: str,
    budget: float,
    what: str = "forward",
    batch: int = 1,
    resources: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """One length, `batch` sequences at once, as plain data: what a `Timing` holds, and `tokens_per_second`.

    what: one of `PASSES`. resources: of `RESOURCES`, measured in a further call each with the same inputs, threads and
    precision.
    """
    backward = what == TRAINING
    with torch.inference_mode(not backward):
        inputs = long_inputs(models[baseline], tokens, length, batch)
        calls = {name: partial(PASSES[what](model), inputs) for name, model in models.items()}
        device = models[baseline].device
        try:
            timings = interleaved(calls, baseline=baseline, budget=budget, device=device)
            rows = {
                name: {**asdict(timing), "tokens_per_second": batch * length / timing.median}
                for name, timing in timings.items()
            }
            for name, call in calls.items():
                rows[name].update({resource: RESOURCES[resource](call, device) for resource in resources})
        finally:
            if backward:
                for model in models.values():
                    model.zero_grad(set_to_none=True)
    return rows


def forward_of(model: PreTrainedModel) -> Pass:
    """One forward pass without a cache; of a language model the logits of the last token only."""
    accepted = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if "logits_to_keep" in accepted:
        extra["logits_to_keep"] = 1
    return lambda inputs: model(**inputs, **extra)


def prefill_of(model: PreTrainedModel) -> Pass:
    """The prompt as `generate` reads it: logits of the last token, and the cache or the states are built anew in each
    call. A model without attention keeps nothing."""
    if model.config._attn_implementation == FREE_IMPLEMENTATION:
        return forward_of(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return lambda inputs: model(**inputs, past_key_values=DynamicCache(config=model.config), use_cache=True, **last)


def _training_pass(model: PreTrainedModel) -> Pass:
    """With gradients of all weights (of `mean(output²)`), as in training."""
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(inputs: Mapping[str, Tensor]) -> None:
        model(**inputs, **extra)[0].float().square().mean().backward()

    return run


TRAINING = "forward+backward"

#: What is timed of a whole model, by the name in a measurement's key.
PASSES: dict[str, Callable[[PreTrainedModel], Pass]] = {
    "forward": forward_of,
    "prefill": prefill_of,
    TRAINING: _training_pass,
}

#: What else can be measured of a call.
RESOURCES: dict[str, Callable[[Callable[[], object], torch.device], int | None]] = {
    "memory": peak_memory,
    "flops": lambda call, device: count_flops(call),
}


@torch.inference_mode()
def layer_speed(
    models: Mapping[str, PreTrainedModel],
    lengths: Sequence[int],
    *,
    baseline: str,
    budget: float,
    seed: int,
    announce: Announce,
) -> SpeedTable:
    """Time the attention of the first layer by itself on random q, k, v (batch 1): no projections, no rest."""
    exact = models[baseline]
    layer = self_attention(exact)[0]
    shape = attention_shape(layer, 0, longest_input(exact))
    function = ALL_ATTENTION_FUNCTIONS[baseline]
    mechanisms: dict[str, LinearAttention] = {}
    for name, model in models.items():
        module: Any = getattr(self_attention(model)[0].module, SUBMODULE, None)
        if module is not None:
            mechanisms[name] = module
    scaling = float(getattr(layer.module, "scaling", None) or shape.head_dim**-0.5)
    dtype = next(exact.parameters()).dtype
    generator = torch.Generator().manual_seed(seed)

    def prepare(length: int) -> dict[str, Callable[[], object]]:
        def normal(heads: int, width: int) -> Tensor:
            return torch.randn(1, heads, length, width, generator=generator).to(exact.device, dtype)

        query = normal(shape.num_heads, shape.head_dim)
        key, value = (
            normal(shape.num_key_value_heads, shape.head_dim),
            normal(shape.num_key_value_heads, shape.value_dim),
        )
        calls: dict[str, Callable[[], object]] = {
            baseline: lambda: function(layer.module, query, key, value, None, dropout=0.0, scaling=scaling)
        }
        for name, mechanism in mechanisms.items():
            calls[name] = lambda run=mechanism: run(  # type: ignore[misc]
                AttentionInputs(query, key, value, scaling, shape.causal)
            )
        return calls

    return _sweep(prepare, lengths, baseline=baseline, budget=budget, device=exact.device, announce=announce)


def _sweep(
    prepare: Callable[[int], dict[str, Callable[[], object]]],
    lengths: Sequence[int],
    *,
    baseline: str,
    budget: float,
    device: torch.device,
    announce: Announce,
) -> SpeedTable:
    """Measure at each length; stops where the next one would take far more than the budget."""
    table = SpeedTable(baseline)
    for index, length in enumerate(lengths):
        expected = _expected_seconds(table, length)
        if expected > max(15 * budget, LONGEST_WAIT):
            left = ", ".join(f"{held:,}" for held in lengths[index:])
            table.notes.append(f"Not timed, for want of time: {left} tokens (one length would take ~{expected:.0f} s).")
            break
        announce(index, f"{length:,} tokens")
        calls = prepare(length)
        timings: dict[str, Timing] = interleaved(calls, baseline=baseline, budget=budget, device=device)
        table.add(length, timings)
    return table


def _expected_seconds(table: SpeedTable, length: int) -> float:
    """Four calls of each (a warm-up and three rounds) from the last length: the baseline's time grows with the square,
    the others' linearly."""
    if not table.lengths:
        return 0.0
    growth = length / table.lengths[-1]
    medians = {name: timings[-1].median for name, timings in table.rows.items()}
    return 4 * sum(median * (growth**2 if name == table.baseline else growth) for name, median in medians.items())
