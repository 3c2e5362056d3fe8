"""How near a patched model is to exact attention, without labels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div
from transformers import PreTrainedModel

from ..integration.discovery import self_attention
from ..integration.exact import AttentionCall, observe_attention
from ..patching import patch_report
from ..utils.models import Batch, evaluation_mode, model_inputs
from .metric import Metric, Numbers, Score


@dataclass(frozen=True)
class LayerFidelity:
    """One patched layer on the exact model's q, k, v: a number for each head, over real queries."""

    index: int  # among the self-attention layers
    name: str
    attention: str  # the name of its mechanism
    kl: list[float] | None  # mean of `Σ_j p_ij log(p_ij / w_ij)` in nats; None where w is no distribution
    output_error: list[float]  # `‖o - ô‖ / ‖o‖`


@dataclass(frozen=True, repr=False)
class Fidelity:
    """How near a patched model is to exact attention on some text."""

    layers: list[LayerFidelity]
    final_cosine: float  # mean over real tokens, of the final hidden states: errors of all layers together
    tokens: int  # real ones; those of the decoder of an encoder-decoder

    @property
    def kl(self) -> float | None:
        """Mean over heads and layers, in nats."""
        values = [*chain.from_iterable(layer.kl or () for layer in self.layers)]
        return fmean(values) if values else None

    @property
    def output_error(self) -> float:
        """Mean over heads and layers."""
        return fmean(chain.from_iterable(layer.output_error for layer in self.layers))

    def table(self) -> pd.DataFrame:
        """Return a row for each layer and one for all of them: means over heads."""
        rows = {
            f"{layer.index} {layer.name}": (layer.attention, layer.kl and fmean(layer.kl), fmean(layer.output_error))
            for layer in self.layers
        }
        rows["mean"] = ("", self.kl, self.output_error)
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=["attention", "KL, nats", "output error"])
        return frame.rename_axis("layer")

    def __repr__(self) -> str:
        text = self.table().to_string(float_format="{:.3f}".format, na_rep="–")
        return f"{text}\ncosine of the final hidden states: {self.final_cosine:.3f}, over {self.tokens:,} tokens"

    def _repr_html_(self) -> str:
        return self.table().to_html(float_format="{:.3f}".format, na_rep="–")


@torch.no_grad()
def measure_fidelity(model: PreTrainedModel, batches: Iterable[Batch]) -> Fidelity:
    """Measure a patched model on batches as the tokenizer gives them. O(L²) in the length of the batches.

    Raises:
        ValueError: The model is not patched, or there are no batches.
    """
    report = patch_report(model)
    backbone = model.base_model
    padding = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"  # of the outputs
    totals: dict[int, Tensor] = {}  # by layer `[4, H]`, over queries: their number, ‖o - ô‖², ‖o‖², Σ kl

    def observer(call: AttentionCall) -> None:
        rows = call.real_queries()
        exact, linear = (out.double().masked_fill(~rows[..., None], 0.0) for out in (call.output, call.linear_output()))
        terms = torch.full_like(rows, math.nan, dtype=torch.float64)
        if call.mechanism.distribution:
            implied = call.linear_weights().double().clamp_min(1e-30).log()
            kl = kl_div(implied, call.exact_weights().double(), reduction="none").sum(dim=-1)
            terms = kl.masked_fill(~rows, 0.0)
        parts = rows.double(), (exact - linear).square().sum(dim=-1), exact.square().sum(dim=-1), terms
        total = torch.stack(parts).sum(dim=(1, 3)).cpu()
        totals[id(call.module)] = totals.get(id(call.module), 0.0) + total

    cosine, tokens = 0.0, 0
    with evaluation_mode(model):
        for batch in batches:
            inputs = model_inputs(backbone, batch)
            with observe_attention(model, observer):
                exact = backbone(**inputs)[0]
            linear = backbone(**inputs)[0]
            similarity = cosine_similarity(exact.double(), linear.double(), dim=-1)
            real = inputs.get(padding, torch.ones_like(similarity)).bool()
            cosine += float(similarity[real].sum())
            tokens += int(real.sum())
    if not tokens:
        raise ValueError("No batches to measure on.")
    layers = []
    for row, layer in zip(report.layers, self_attention(model), strict=True):
        if id(layer.module) in totals:
            rows, errors, norms, kl = totals[id(layer.module)]
            mean = None if kl.isnan().any() else (kl / rows.clamp_min(1)).tolist()
            error = (errors / norms.clamp_min(1e-300)).sqrt().tolist()
            layers.append(LayerFidelity(row.index, row.name, row.attention, mean, error))
    return Fidelity(layers, cosine / tokens, tokens)


class FidelityMetric(Metric):
    """`measure_fidelity` as a metric: the means over layers and heads, and the cosine of the final hidden states.

    Args:
        batches: Inputs.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.score = Score("fidelity", "output_error", "output error", greater_is_better=False, digits=2)

    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure a patched model."""
        fidelity = measure_fidelity(model, self.batches)
        return {
            "kl": fidelity.kl,
            "output_error": fidelity.output_error,
            "final_cosine": fidelity.final_cosine,
            "tokens": fidelity.tokens,
        }
