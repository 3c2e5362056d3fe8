"""The kinds of model that recipes train: what they load, how they batch, what they predict, how they are judged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .loop import Goal
from .options import DataSettings
from .sharding import autocast

INSTALL = "pip install 'hf-linear-attn[train]'"


class Problem:
    """A model kind with its data, ready for `Loop`.

    train, validation: encoded rows. For tasks with several validation sets (MNLI) `validation` maps a suffix of the
    metrics' names to rows.
    """

    auto_class = ""
    regression = False
    goal: Goal

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.train: Sequence[Any] = []
        self.validation: dict[str, Sequence[Any]] = {}
        self.facts: dict[str, Any] = {}
        #: Tokens of the longest row, of training or validation.
        self.longest = 0
        self._loaders: dict[str, Any] = {}

    def config_changes(self) -> dict[str, Any]:
        """What a fresh head needs in the model's config."""
        return {}

    def predicted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[N, C]` at the places that are predicted, and their targets `[N]`."""
        raise NotImplementedError

    def row_counts(self, labels: Tensor) -> Tensor:
        """How many of the N are of each row of the batch, `[B]`."""
        raise NotImplementedError

    def collate(self, rows: list[Any], generator: torch.Generator) -> dict[str, Tensor]:
        """A batch; what is random in it comes from the generator."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, accelerator: Accelerator, batch_size: int) -> dict[str, float]:
        """Metrics on the whole validation data; each process works on its share, each example counts once."""
        raise NotImplementedError

    def _loader(self, suffix: str, accelerator: Accelerator, batch_size: int) -> Any:
        """Batches of one validation set, short rows first; what is random in them depends on their place only."""
        from ..data.encode import row_lengths

        def collate(numbered: list[tuple[int, Any]]) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(numbered[0][0])
            return self.collate([row for _, row in numbered], generator)

        if suffix not in self._loaders:
            held: Any = self.validation[suffix]
            lengths = row_lengths(held)
            rows: Any = _Enumerated(held, sorted(range(len(held)), key=lengths.__getitem__))
            loader: Any = torch.utils.data.DataLoader(rows, batch_size=batch_size, collate_fn=collate)
            self._loaders[suffix] = accelerator.prepare(loader)
        return self._loaders[suffix]


@dataclass
class _Enumerated:
    rows: Sequence[Any]
    order: Sequence[int]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return place, self.rows[self.order[place]]


class Classification(Problem):
    """One label, or one score, for a sentence or a pair."""

    auto_class = "AutoModelForSequenceClassification"

    def __init__(
        self,
        tokenizer: Any,
        data: DataSettings,
        columns: Sequence[str],
        labels: Sequence[str] | None,
        metrics: Sequence[str],
    ) -> None:
        super().__init__(tokenizer, data)
        self.columns = tuple(columns)
        self.labels = None if labels is None else tuple(labels)
        self.metrics = tuple(metrics)
        self.regression = labels is None
        self.goal = Goal(self.metrics[0], self.metrics[0] != "mse")
        from ..data.metrics import TaskMetrics

        TaskMetrics(self.metrics)  # a name that does not load is an error now, not after the first pass over the data

    def config_changes(self) -> dict[str, Any]:
        if self.labels is None:
            return {"num_labels": 1, "problem_type": "regression"}
        return {
            "problem_type": "single_label_classification",
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }

    def predicted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits, labels

    def row_counts(self, labels: Tensor) -> Tensor:
        return torch.ones(labels.shape[0], dtype=torch.long, device=labels.device)

    def collate(self, rows: list[Any], generator: torch.Generator) -> dict[str, Tensor]:
        from ..data.collate import collate_padded

        return collate_padded(rows, pad_token(self.tokenizer))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator, batch_size: int) -> dict[str, float]:
        from ..data.metrics import TaskMetrics

        found: dict[str, float] = {}
        for suffix in self.validation:
            metric = TaskMetrics(self.metrics)
            for batch in self._loader(suffix, accelerator, batch_size):
                labels = batch.pop("labels")
                with autocast(accelerator):
                    logits = model(**batch).logits
                answers = logits.squeeze(-1).float() if self.regression else logits.argmax(dim=-1)
                answers, labels = accelerator.gather_for_metrics((answers, labels))
                metric.add_batch(predictions=answers.cpu().numpy(), references=labels.cpu().numpy())
            scores = metric.compute() or {}
            for name, value in scores.items():
                found[name + suffix] = float(value)
        for name in self.metrics:
            if name not in found:  # several validation sets: the first decides
                found[name] = next(value for key, value in found.items() if key.startswith(name))
        return found


class LanguageModel(Problem):
    """Predicts tokens; judged by the mean loss a token and its exponential."""

    goal = Goal("loss", higher_is_better=False)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator, batch_size: int) -> dict[str, float]:
        loss = torch.zeros((), dtype=torch.float64)
        count = 0
        for batch in self._loader("", accelerator, batch_size):
            labels = batch.pop("labels")
            with autocast(accelerator):
                logits = model(**batch).logits
            losses, counts = self._row_losses(logits, labels)
            losses, counts = accelerator.gather_for_metrics((losses, counts))
            loss += losses.double().sum().cpu()
            count += int(counts.sum())
        if not count:
            raise ValueError("The validation data has no token to predict.")
        mean = float(loss) / count
        return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}

    def _row_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and number of targets of each row."""
        losses = []
        for row, wanted in zip(logits, labels, strict=True):
            scores, targets = self.predicted(row[None], wanted[None])
            losses.append(nn.functional.cross_entropy(scores.float(), targets, reduction="sum"))
        return torch.stack(losses), self.row_counts(labels)


class CausalLM(LanguageModel):
    """Predicts the next token."""

    auto_class = "AutoModelForCausalLM"

    def predicted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wanted = labels[:, 1:]
        kept = wanted != -100
        return logits[:, :-1][kept], wanted[kept]

    def row_counts(self, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum(1)

    def collate(self, rows: list[Any], generator: torch.Generator) -> dict[str, Tensor]:
        from ..data.collate import collate_padded

        batch = collate_padded(rows, pad_token(self.tokenizer))
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch


class MaskedLM(LanguageModel):
    """Predicts masked tokens. The masks of the validation data are the same in every evaluation."""

    auto_class = "AutoModelForMaskedLM"

    def predicted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        kept = labels != -100
        return logits[kept], labels[kept]

    def row_counts(self, labels: Tensor) -> Tensor:
        return (labels != -100).sum(1)

    def collate(self, rows: list[Any], generator: torch.Generator) -> dict[str, Tensor]:
        from ..data.collate import collate_padded, mask_tokens

        batch = collate_padded(rows, pad_token(self.tokenizer))
        return mask_tokens(batch, self.tokenizer, generator, self.data.mask_probability)


def pad_token(tokenizer: Any) -> int:
    """The padding token; where there is none any token will do, since it is masked."""
    return next((held for held in (tokenizer.pad_token_id, tokenizer.eos_token_id) if held is not None), 0)


# --------------------------------------------------------------------------------------------------------------------
# Data


def build_problem(kind: str, tokenizer: Any, data: DataSettings, seed: int) -> Problem:
    """Load, encode and cut the data of a kind of model.

    Raises:
        ValueError, OSError: data that is missing, unreadable, or does not fit the kind.
        ImportError: the `train` extra is not installed.
    """
    try:
        import datasets
        import evaluate  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Training needs {error.name}, which is not installed: {INSTALL}") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if data.task is None and data.source is None:
        raise ValueError("No data: give data.task (a known task) or data.source (your own data).")
    return BUILDERS[kind](tokenizer, data, seed)


def _classification(tokenizer: Any, data: DataSettings, seed: int) -> Problem:
    from ..data.encode import encode_pairs

    if data.task is not None:
        from ..data.tasks import get_task, load_task

        task = get_task(data.task)
        loaded = load_task(data.task, folder=data.folder, revision=data.revision)
        columns, labels, metrics = task.columns, task.labels, data.metrics or (task.main_metric, *task.metrics)
        label = "label"
    else:
        loaded, label = own_data(data, seed, (*data.text, data.label)), data.label
        columns, labels = data.text, _label_names(loaded, label)
        metrics = data.metrics or (("accuracy",) if labels is not None else ("pearson", "spearmanr"))
        if labels is not None:
            loaded = _numbered(loaded, label, labels)
    problem = Classification(tokenizer, data, columns, labels, tuple(dict.fromkeys(metrics)))
    _fill(problem, loaded, seed, lambda rows: encode_pairs(rows, tokenizer, columns, data.max_length, label=label))
    return problem


def _causal(tokenizer: Any, data: DataSettings, seed: int) -> Problem:
    from ..data.encode import encode_blocks

    problem = CausalLM(tokenizer, data)
    loaded = own_data(data, seed, data.text[:1])
    marked = tokenizer.eos_token_id is not None  # without such a token documents are joined as they are

    def encode(rows: Any) -> Any:
        return encode_blocks(rows, tokenizer, data.text[0], data.max_length, eos=marked)

    _fill(problem, loaded, seed, encode)
    return problem


def _masked(tokenizer: Any, data: DataSettings, seed: int) -> Problem:
    from ..data.encode import encode_documents

    if tokenizer.mask_token_id is None:
        raise ValueError(f"{type(tokenizer).__name__} has no mask token: masked-lm needs the tokenizer of a masked LM.")
    problem = MaskedLM(tokenizer, data)
    loaded = own_data(data, seed, data.text[:1])
    _fill(problem, loaded, seed, lambda rows: encode_documents(rows, tokenizer, data.text[0], data.max_length))
    return problem


BUILDERS: dict[str, Callable[[Any, DataSettings, int], Problem]] = {
    "classification": _classification,
    "causal-lm": _causal,
    "masked-lm": _masked,
}


def own_data(data: DataSettings, seed: int, columns: Sequence[str]) -> Any:
    """The data set with splits `train` and `validation`; a validation split is carved out where there is none."""
    from ..data.sources import carve_validation, check_columns, load_source

    if data.source is None:
        from ..data.tasks import get_task, load_task

        assert data.task is not None
        task = get_task(data.task)
        if tuple(columns) != tuple(task.columns[: len(columns)]):
            raise ValueError(
                f"data.text names {', '.join(columns)!r}; task {data.task!r} has {', '.join(task.columns)!r}. Set it."
            )
        loaded = load_task(data.task, folder=data.folder, revision=data.revision)
    else:
        loaded = load_source(data.source, config=data.config, revision=data.revision)
    if "train" not in loaded:
        raise ValueError(f"The data has no split 'train', only {', '.join(map(repr, loaded))}.")
    check_columns(loaded, columns, None)
    if not any(name.startswith("validation") for name in loaded):
        loaded = carve_validation(loaded, data.validation_share, seed)
    return loaded


def _label_names(loaded: Any, label: str) -> tuple[str, ...] | None:
    """The names of the classes; None for scores (floating-point labels)."""
    feature = loaded["train"].features[label]
    if hasattr(feature, "names"):
        return tuple(feature.names)
    if str(getattr(feature, "dtype", "")).startswith("float"):
        return None
    return tuple(str(value) for value in sorted(set(loaded["train"][label])))


def _numbered(loaded: Any, label: str, labels: Sequence[str]) -> Any:
    """Labels as class numbers. Raises a ValueError for one that does not occur in the training data."""
    if hasattr(loaded["train"].features[label], "names"):
        return loaded
    numbers = {name: index for index, name in enumerate(labels)}

    def number(row: dict[str, Any]) -> dict[str, Any]:
        value = str(row[label])
        if value not in numbers:
            raise ValueError(f"The label {value!r} does not occur in the training data ({', '.join(numbers)}).")
        return {"__label": numbers[value]}

    return loaded.map(number, remove_columns=[label], keep_in_memory=True).rename_column("__label", label)


def _fill(problem: Problem, loaded: Any, seed: int, encode: Callable[[Any], Any]) -> None:
    """Cut and encode the splits, and note what they hold."""
    from ..data.encode import row_lengths

    data = problem.data
    train = loaded["train"]
    blocks = isinstance(problem, CausalLM)
    if not blocks and data.max_train is not None and data.max_train < len(train):
        train = train.select(_drawn(len(train), data.max_train, seed))
    encoded = encode(train)
    rows = encoded.dataset
    if blocks and data.max_train is not None and data.max_train < len(rows):
        rows = rows.select(_drawn(len(rows), data.max_train, seed))
    problem.train = rows
    problem.facts = {"train_rows": len(rows), "train_tokens": encoded.tokens, "train_truncated": encoded.truncated}
    names = [name for name in loaded if name.startswith("validation")]
    for name in names:
        split = loaded[name]
        if not blocks and data.max_validation is not None and data.max_validation < len(split):
            # Drawn, since files are often sorted by label; by no setting, so that all runs are judged by the same ones.
            split = split.select(sorted(_drawn(len(split), data.max_validation, 0)))
        held = encode(split).dataset
        if blocks and data.max_validation is not None:
            held = held.select(range(min(len(held), data.max_validation)))
        suffix = "" if len(names) == 1 else name.removeprefix("validation")
        problem.validation[suffix] = held
        problem.facts[f"{name}_rows"] = len(held)
    if not len(problem.train) or not all(len(held) for held in problem.validation.values()):
        raise ValueError(f"The data gives {problem.facts}: nothing to train or to evaluate on.")
    problem.longest = max(max(row_lengths(rows)) for rows in (problem.train, *problem.validation.values()))


def _drawn(count: int, wanted: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:wanted].tolist()
