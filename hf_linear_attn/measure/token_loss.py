"""The loss of predicted tokens: of decoders, of masked language models and of encoder-decoders."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..data.metrics import loss_with_error, perplexity
from ..data.task_data import IGNORED
from ..utils.models import Batch, evaluation_mode, model_inputs
from .metric import Metric, Numbers, Score, in_batches


class TokenLoss(Metric):
    """The mean loss of the predicted tokens, in nats, and the perplexity `exp(loss)`.

    `loss = -Σ log p(token) / tokens`, over all tokens with a label, however the rows are batched. The standard error is
    that of a ratio of sums over rows; a single row has none.

    Args:
        batches: Tensors `input_ids`, `labels` (-100 where nothing is to be predicted) and perhaps `attention_mask`.
        predicts_next: Whether token i predicts the label of token i + 1, as in a decoder.
        positions: Number of equal parts of the longest row whose losses are told apart: `loss_at_0`, ….
    """

    def __init__(self, batches: Sequence[Batch], *, predicts_next: bool = True, positions: int = 0) -> None:
        self.batches, self.predicts_next, self.positions = batches, predicts_next, positions
        self.score = Score("language_model", "perplexity", "perplexity", greater_is_better=False, digits=2)

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure a model. A ValueError if there is no token to predict."""
        with evaluation_mode(model):
            losses, counted = zip(*self._rows(model), strict=True)
        by_row = torch.tensor([float(loss.sum()) for loss in losses], dtype=torch.float64)
        counts = torch.tensor([int(count.sum()) for count in counted], dtype=torch.float64)
        tokens = int(counts.sum())
        if not tokens:
            raise ValueError("There is no token to predict. Give longer rows.")
        loss, error = loss_with_error(by_row, counts)
        values = {"loss": loss, "perplexity": perplexity(loss)}
        if error is not None:
            values |= {"loss_stderr": error, "perplexity_stderr": values["perplexity"] * error}
        longest = max(len(count) for count in counted)
        values |= {"tokens": tokens, "longest_input": longest + self.predicts_next}
        for part in range(self.positions):
            start, stop = (-(-longest * edge // self.positions) for edge in (part, part + 1))
            total = sum(float(loss[start:stop].sum()) for loss in losses)
            number = sum(int(count[start:stop].sum()) for count in counted)
            values[f"loss_at_{start}"] = total / number if number else math.nan
        return values

    def _rows(self, model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each row, the loss of each of its tokens, and whether the token is predicted."""
        for batch in self.batches:
            logits = model(**model_inputs(model, batch)).logits
            labels = batch["labels"].to(model.device)
            if self.predicts_next:
                logits, labels = logits[:, :-1], labels[:, 1:]
            for row, expected in zip(logits, labels, strict=True):  # all rows at once would take too much memory
                loss = cross_entropy(row.float(), expected, ignore_index=IGNORED, reduction="none")
                yield loss.double().cpu(), (expected != IGNORED).cpu()


def strided_windows(documents: Sequence[Sequence[int]], context: int, stride: int) -> list[Batch]:
    """Return batches of windows of at most `context` tokens, `stride` apart, for a `TokenLoss`.

    Each token but a document's first is predicted once; every one but those of a first window sees at least
    `context - stride` earlier tokens. A ValueError if the numbers are out of range.
    """
    if context < 2 or not 1 <= stride <= context - 1:
        raise ValueError(f"context must be at least 2 and stride from 1 to context - 1, got {context} and {stride}.")
    rows = []
    for document in documents:
        predicted = 1
        for start in range(0, max(len(document) - 1, 0), stride):
            stop = min(start + context, len(document))
            if stop <= predicted:
                break
            labels = [IGNORED] * (predicted - start) + list(document[predicted:stop])
            rows.append({"input_ids": list(document[start:stop]), "labels": labels})
            predicted = stop
    # Windows of similar length are batched together, which needs little padding.
    return in_batches(sorted(rows, key=lambda row: len(row["input_ids"])), _padded)


def _padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": filled("input_ids", 0),
        "labels": filled("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }
