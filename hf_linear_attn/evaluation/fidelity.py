"""How near a patched model is to exact attention, without labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.context import SUBMODULE
from ..integration.discovery import self_attention
from ..integration.exact import AttentionCall, observe_attention
from ..patching import CONFIG_FIELD, check_model, is_patched

Batch = Mapping[str, Tensor]


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model in evaluation mode, and afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def model_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """Return what a model's forward pass accepts of a batch, on its device, without labels and without a cache."""
    accepted = set(inspect.signature(model.forward).parameters)
    inputs: dict[str, Any] = {
        name: tensor.to(model.device) for name, tensor in batch.items() if name in accepted and name != "labels"
    }
    return {**inputs, "use_cache": False} if "use_cache" in accepted else inputs


@dataclass(frozen=True)
class LayerFidelity:
    """One patched layer, a number per head.

    kl: mean over real queries of `Σ_j p_ij log(p_ij / w_ij)` in nats (None where the implied weights are no
    distribution). output_error: `‖o - ô‖ / ‖o‖` over real queries, both from the exact model's q, k, v.
    """

    index: int
    name: str
    attention: str
    kl: list[float] | None
    output_error: list[float]


@dataclass(frozen=True)
class Fidelity:
    """Fidelity of a model on some text. final_cosine: mean cosine between the final hidden states of real tokens with
    linear and with exact attention (errors of all layers together); the rest is layer by layer on exact inputs."""

    layers: list[LayerFidelity]
    final_cosine: float
    tokens: int

    @property
    def kl(self) -> float | None:
        """Mean over heads and layers, in nats."""
        values = [value for layer in self.layers if layer.kl is not None for value in layer.kl]
        return sum(values) / len(values) if values else None

    @property
    def output_error(self) -> float:
        """Mean over heads and layers."""
        values = [value for layer in self.layers for value in layer.output_error]
        return sum(values) / len(values)


def _sums(call: AttentionCall) -> dict[str, Tensor]:
    """Sums over the real queries of one call, per head, float64 on the CPU."""
    rows = call.real_queries()
    exact_out, linear_out = (
        out.double().masked_fill(~rows.unsqueeze(-1), 0.0) for out in (call.output, call.linear_output())
    )
    sums = {
        "rows": rows.sum(dim=(0, 2)).double(),
        "error": (exact_out - linear_out).square().sum(dim=(0, 2, 3)),
        "norm": exact_out.square().sum(dim=(0, 2, 3)),
    }
    if call.mechanism.distribution:
        exact, linear = call.exact_weights().double(), call.linear_weights().double()
        terms = exact * (exact.clamp_min(1e-300).log() - linear.clamp_min(1e-30).log())
        sums["kl"] = terms.sum(dim=-1).masked_fill(~rows, 0.0).sum(dim=(0, 2))
    return {name: tensor.cpu() for name, tensor in sums.items()}


@torch.no_grad()
def measure_fidelity(model: PreTrainedModel, batches: Iterable[Batch]) -> Fidelity:
    """Measure a patched model on batches as the tokenizer gives them. O(L²) in the length of the batches.

    Raises:
        ValueError: the model is not patched, or there are no batches.
    """
    check_model(model)
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")
    backbone = model if model.config.is_encoder_decoder else model.base_model
    totals: dict[int, dict[str, Tensor]] = {}  # by layer

    def observer(call: AttentionCall) -> None:
        known = totals.setdefault(id(call.module), {})
        known.update({name: known.get(name, 0.0) + tensor for name, tensor in _sums(call).items()})

    cosine, tokens = 0.0, 0
    with evaluation_mode(model):
        for batch in batches:
            inputs = model_inputs(backbone, batch)
            with observe_attention(model, observer):
                exact = backbone(**inputs)[0]
            linear = backbone(**inputs)[0]
            similarity = torch.nn.functional.cosine_similarity(exact.double(), linear.double(), dim=-1)
            real = inputs.get("attention_mask", torch.ones_like(similarity)).bool()
            cosine += float(similarity[real].sum())
            tokens += int(real.sum())
    if not tokens:
        raise ValueError("No batches to measure on.")
    saved = getattr(model.config, CONFIG_FIELD)["layers"]
    layers = []
    for index, layer in enumerate(self_attention(model)):
        total = totals.get(id(layer.module))
        if total is None or getattr(layer.module, SUBMODULE, None) is None:
            continue
        kl = (total["kl"] / total["rows"].clamp_min(1)).tolist() if "kl" in total else None
        error = (total["error"] / total["norm"].clamp_min(1e-300)).sqrt().tolist()
        layers.append(LayerFidelity(index, layer.name, saved[str(index)]["attention"], kl, error))
    return Fidelity(layers, cosine / tokens, tokens)
