"""What the linear part of each layer is worth to the model, and closing those that do harm."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import patched_modules
from ..integration.models import check_patched
from ..mechanisms.head_mixture import linear_mechanism
from ..mechanisms.window import CLOSED_MIX, WindowAttention, is_closed
from ..utils.models import Batch, evaluation_mode, model_inputs, refuse_single_batch
from .losses import exact_outputs, model_losses

#: Columns of the table of `LinearParts`.
COLUMNS = ["layer", "worth", "stderr", "kept"]


@dataclass(frozen=True, repr=False)
class LinearParts:
    """What the linear parts of a model's windows are worth, in the loss of the model.

    Attributes:
        table: A row for each layer with a linear part that was open: `layer`, `worth` (the loss without the part, minus
            that with it), its standard error `stderr`, and whether it is `kept`.
        loss: The loss with all parts open, with all closed, and with those that are `kept`.
    """

    table: pd.DataFrame
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
    nats (squared differences in regression), or `1 - cosine` of mean-pooled embeddings. A part is closed if the loss is
    lower without it by more than the standard error of the difference, over tokens or rows: closing by less would fit
    the noise of a few rows. If then the model with all parts open, or with none, is better by more than the standard
    error, that remains. This takes a pass over the batches for each layer with such a part, and at most four more.
    Batches must be held out: a part fits its training text, and can do harm on any other.

    Args:
        model: A patched model. Layers without a window, or without an open part, are left as they are.
        batches: Held-out batches, as dicts of tensors `[B, L]`; some of them of other text than that of the training.

    Returns:
        What each part is worth, and whether it was kept.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or `batches` is one batch alone.
        ValueError: The model is not patched, there are no batches, or the loss is NaN or infinite with all parts
            closed.
    """
    check_patched(model)
    refuse_single_batch(batches)
    inputs = [model_inputs(model, batch) for batch in batches]
    if not inputs:
        raise ValueError("There are no batches to measure on.")
    weights = _open_parts(model)
    if not weights:
        return LinearParts(pd.DataFrame(columns=COLUMNS), {})
    everything = frozenset(weights)
    nothing = frozenset[int]()
    with evaluation_mode(model):
        losses = _LossesByPart(model, inputs, weights)
        if not losses.is_finite(nothing):
            raise ValueError(
                "The loss of the model is not finite with all linear parts closed. Give batches with two real tokens "
                "or more each, and a model without NaN or infinite weights."
            )
        worth = {layer: losses.excess(everything - {layer}, everything) for layer in weights}
        opened = frozenset(layer for layer, (mean, stderr) in worth.items() if not mean < -stderr)
        for other in (everything, nothing):
            mean, stderr = losses.excess(opened, other)
            if mean > stderr or not losses.is_finite(opened):
                opened = other
        models = {"all open": everything, "all closed": nothing, "kept": opened}
        means = {name: float(losses.of(layers).mean()) for name, layers in models.items()}
    for layer, log_mix in weights.items():
        if layer not in opened:
            log_mix.fill_(CLOSED_MIX)
    rows = [(layer, *value, layer in opened) for layer, value in worth.items()]
    return LinearParts(pd.DataFrame(rows, columns=COLUMNS), means)


def _open_parts(model: PreTrainedModel) -> dict[int, Tensor]:
    """Return the log mixing weights of the layers whose window has an open linear part beside it."""
    weights: dict[int, Tensor] = {}
    for layer, module in patched_modules(model).items():
        mechanism = linear_mechanism(module.linear_attention)
        if isinstance(mechanism, WindowAttention) and not bool(is_closed(mechanism.log_mix).all()):
            weights[layer] = mechanism.log_mix
    return weights


class _LossesByPart:
    """The losses of a model on batches, by the layers whose linear parts are open; `weights` are their log mixes."""

    def __init__(self, model: PreTrainedModel, inputs: list[dict[str, Any]], weights: dict[int, Tensor]) -> None:
        self.model = model
        self.inputs = inputs
        self.weights = weights
        self._exact = [exact_outputs(model, batch) for batch in inputs]
        self._measured: dict[frozenset[int], Tensor] = {}

    def of(self, opened: frozenset[int]) -> Tensor:
        """Return the loss of each token or row."""
        if opened not in self._measured:
            closed = {layer: log_mix.clone() for layer, log_mix in self.weights.items() if layer not in opened}
            try:
                for layer in closed:
                    self.weights[layer].fill_(CLOSED_MIX)
                self._measured[opened] = torch.cat(list(map(self._batch_losses, self.inputs, self._exact)))
            finally:
                for layer, log_mix in closed.items():
                    self.weights[layer].copy_(log_mix)
        return self._measured[opened]

    def _batch_losses(self, batch: dict[str, Any], exact: Any) -> Tensor:
        return model_losses(self.model(**batch), batch, exact, self.model.config.problem_type).double()

    def is_finite(self, opened: frozenset[int]) -> bool:
        """Return whether the mean loss is neither infinite nor NaN."""
        return math.isfinite(float(self.of(opened).mean()))

    def excess(self, opened: frozenset[int], other: frozenset[int]) -> tuple[float, float]:
        """Return by how much the loss is above another one, and the standard error of the difference."""
        difference = self.of(opened) - self.of(other)
        deviation = float(difference.std()) if len(difference) > 1 else math.nan
        return float(difference.mean()), deviation / math.sqrt(len(difference))
