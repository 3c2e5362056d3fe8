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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..integration.attention import SUBMODULE
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..mechanisms.base import LinearAttention
from .resources import count_flops, peak_memory
from .timing import SpeedTable, Timing, interleaved

#: The name of the row that shows what a model costs without any attention.
FREE = "no attention"
FREE_IMPLEMENTATION = "hf_linear_attn_free"

#: Seconds that one length may take in any case, even with a small budget: without long inputs there is little to see.
LONGEST_WAIT = 60.0

Announce = Callable[[int, str], None]
"""Called with the number of lengths done and a note."""


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


def long_inputs(model: PreTrainedModel, tokens: Sequence[int], length: int) -> dict[str, Tensor]:
    """`[1, length]` inputs: the tokens, repeated as needed. Positions past the model's table begin again from zero.

    The values change nothing about the speed; the outputs at such lengths mean nothing and are not used.
    """
    repeated = (list(tokens) * (length // len(tokens) + 1))[:length]
    ids = torch.tensor([repeated], device=model.device)
    # A mask of ones: position ids that begin again would otherwise be read as several packed documents.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    accepted = inspect.signature(model.forward).parameters
    inputs.update(position_inputs(model, length))
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
    backward: bool = False,
    resources: bool = False,
) -> dict[str, dict[str, Any]]:
    """One length (batch 1), as plain data: what a `Timing` holds, and `tokens_per_second`.

    backward: with gradients of all weights (of `mean(output²)`), as in training. resources: also `flops`, and `memory`,
    the peak of a further call with the same inputs, threads and precision.
    """
    with torch.inference_mode(not backward):
        inputs = long_inputs(models[baseline], tokens, length)
        make = _training_pass if backward else forward_of
        calls = {name: partial(make(model), inputs) for name, model in models.items()}
        device = models[baseline].device
        try:
            timings = interleaved(calls, baseline=baseline, budget=budget, device=device)
            rows = {
                name: {**asdict(timing), "tokens_per_second": length / timing.median}
                for name, timing in timings.items()
            }
            if resources:
                for name, call in calls.items():
                    rows[name].update(memory=peak_memory(call, device), flops=count_flops(call))
        finally:
            if backward:
                for model in models.values():
                    model.zero_grad(set_to_none=True)
    return rows


def _training_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(inputs: Mapping[str, Tensor]) -> None:
        model(**inputs, **extra)[0].float().square().mean().backward()

    return run


def forward_of(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """One forward pass as `generate` would prefill: no cache, and logits of the last token only."""
    accepted = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in accepted:
        extra["use_cache"] = False
    if "logits_to_keep" in accepted:
        extra["logits_to_keep"] = 1
    return lambda inputs: model(**inputs, **extra)


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
                query, key, value, scaling=scaling, causal=shape.causal
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
    if not table.lengths:
        return 0.0
    medians = {name: timings[-1].median for name, timings in table.rows.items()}
    return expected_seconds(medians, table.baseline, length / table.lengths[-1])


def expected_seconds(medians: Mapping[str, float], baseline: str, growth: float) -> float:
    """Four calls of each (a warm-up and three rounds) at `growth` times the length: the baseline's time grows with the
    square, the others' linearly."""
    return 4 * sum(median * (growth**2 if name == baseline else growth) for name, median in medians.items())
