"""What the linear part of each layer is worth to the model, and closing those that do harm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.context import attention_modules
from ..integration.discovery import self_attention
from ..integration.exact import exact_attention
from ..integration.models import check_model, check_patched
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.window import CLOSED_MIX, WindowAttention
from ..utils.models import Batch, evaluation_mode, model_inputs
from .losses import next_token_loss, output_divergence

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class LinearParts:
    """What the linear parts of a model's windows are worth, in the loss of the model.

    Attributes:
        table: A row for each layer with a linear part that was open: `layer`, `worth` (the loss without the part, minus
            that with it) and whether it is `kept`.
        loss: The loss with all parts open, with all closed, and with those that are `kept`.
    """

    table: pandas.DataFrame
    loss: Mapping[str, float]

    @property
    def closed(self) -> list[int]:
        """The layers whose linear part has been closed."""
        return self.table.loc[~self.table["kept"], "layer"].tolist()

    def __repr__(self) -> str:
        if not len(self.table):
            return "no layer has an open linear part beside a window"
        losses = ", ".join(f"{name} {value:.4f}" for name, value in self.loss.items())
        return f"loss of the model by its linear parts: {losses}\n{self.table.to_string(float_format='{:+.4f}'.format)}"

    def _repr_html_(self) -> str:
        return self.table.to_html(float_format="{:+.4f}".format, index=False)


@torch.no_grad()
def close_harmful_parts(model: PreTrainedModel, batches: Iterable[Batch]) -> LinearParts:
    """Close the linear part of each window without which the model is better, in place.

    A closed part has weights of zero: only window, sinks and store of the layer remain. The loss is that of the next
    tokens in a language model, and otherwise the divergence of the outputs from those of exact attention: of logits in
    nats, or `1 - cosine` of mean-pooled embeddings. Of three models, with all parts open, with those open that are
    worth something by themselves, and with none, the one with the least loss remains, and that with fewer open parts if
    two are equal. This takes a pass over the batches for each layer with such a part, and three more. Batches must be
    held out: a part fits its training text, and can do harm on any other.

    Args:
        model: A patched model. Layers without a window, or without an open part, are left as they are.
        batches: Held-out batches, as dicts of tensors `[B, L]`; some of them of other text than that of the training.

    Returns:
        What each part is worth, and whether it was kept.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or `batches` is one batch alone.
        ValueError: The model is not patched, or there are no batches.
    """
    import pandas as pd

    check_model(model)
    check_patched(model)
    if isinstance(batches, Mapping | Tensor):
        raise TypeError("batches is one batch alone. Pass an iterable of batches, such as [batch].")
    inputs = [model_inputs(model, batch) for batch in batches]
    if not inputs:
        raise ValueError("There are no batches to measure on.")
    numbers = {id(layer.module): index for index, layer in enumerate(self_attention(model))}
    parts = {numbers[id(module)]: _window(module.linear_attention) for module in attention_modules(model)}
    weights = {
        layer: window.log_mix
        for layer, window in sorted(parts.items())
        if window is not None and bool((window.log_mix > CLOSED_MIX).any())
    }
    if not weights:
        return LinearParts(pd.DataFrame(columns=["layer", "worth", "kept"]), {})
    with evaluation_mode(model):
        measured = _Losses(model, inputs)
        everything = set(weights)
        worth = {layer: measured.loss(weights, everything - {layer}) for layer in weights}
        with_all, without = measured.loss(weights, everything), measured.loss(weights, set())
        worth = {layer: loss - with_all for layer, loss in worth.items()}
        useful = {layer for layer, value in worth.items() if value > 0}
        candidates = [(without, set()), (measured.loss(weights, useful), useful), (with_all, everything)]
    loss, kept = min(candidates, key=lambda candidate: candidate[0])
    for layer, log_mix in weights.items():
        if layer not in kept:
            log_mix.fill_(CLOSED_MIX)
    rows = [(layer, value, layer in kept) for layer, value in worth.items()]
    table = pd.DataFrame(rows, columns=["layer", "worth", "kept"])
    return LinearParts(table, {"all open": with_all, "all closed": without, "kept": loss})


def _window(mechanism: Any) -> WindowAttention | None:
    linear = mechanism.mechanism if isinstance(mechanism, HeadMixture) else mechanism
    return linear if isinstance(linear, WindowAttention) else None


class _Losses:
    """The loss of a model with some of its linear parts open."""

    def __init__(self, model: Any, inputs: list[dict[str, Any]]) -> None:
        self.model, self.inputs = model, inputs
        self.predicts_next = model.can_generate() and all(layer.causal for layer in self_attention(model))
        self.exact = []
        if not self.predicts_next:
            with exact_attention(model):
                self.exact = [model(**batch) for batch in inputs]

    def loss(self, weights: Mapping[int, Tensor], opened: set[int]) -> float:
        before = {layer: log_mix.clone() for layer, log_mix in weights.items() if layer not in opened}
        for layer in before:
            weights[layer].fill_(CLOSED_MIX)
        try:
            if self.predicts_next:
                losses = [next_token_loss(self.model(**batch).logits, batch) for batch in self.inputs]
            else:
                pairs = zip(self.inputs, self.exact, strict=True)
                losses = [
                    output_divergence(self.model(**batch), exact, batch.get("attention_mask")) for batch, exact in pairs
                ]
        finally:
            for layer, log_mix in before.items():
                weights[layer].copy_(log_mix)
        return float(torch.stack(losses).mean())
