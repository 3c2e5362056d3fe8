"""The data of a task as a Trainer takes it: encoded rows, a collator, metrics; and what its model's head needs."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EvalPrediction,
)

from ..utils.options import OptionError
from .config import PYTHON_DOCUMENTATION, DataConfig
from .encoding import BATCH_SIZE, Encoded, encode_blocks, encode_pairs, encode_passages, encode_targets, row_lengths
from .files import (
    FORMATS,
    TEXT_FORMATS,
    check_columns,
    check_text,
    file_suffix,
    hold_out_validation,
    import_datasets,
    load_source,
)
from .tasks import (
    TASKS,
    Task,
    compute_metrics,
    constant_answer_score,
    higher_is_better,
    likeliest_classes,
    load_task,
    perplexity,
)
from .text import MIN_DOCUMENTS, Text, hold_out, load_text, rows_text, standard_library_documents

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: Text that names a class by its number, as Transformers does by default.
_CLASS_NUMBER = re.compile(r"(LABEL_)?\s*[-+]?\d+\s*")

#: Label of a token that is not to be predicted.
IGNORED = -100

AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "embedding": "AutoModel",
}

#: What evaluations, plans and budgets call a model for a task.
KINDS = {"causal-lm": "decoder", "embedding": "encoder", "classification": "classifier"}


@dataclass
class TaskData:
    """The encoded data of a task."""

    task_type: str  # a key of `AUTO_CLASSES`
    tokenizer: Any
    collator: Callable[[list[Any]], dict[str, Tensor]]
    train: Dataset = field(init=False)
    #: Encoded rows by name. The name is a prefix of metrics' names; it is empty if there is one set only.
    validation: dict[str, Dataset] = field(default_factory=dict)
    metric: str = "loss"  # it decides which step is best
    greater_is_better: bool = False
    metric_names: tuple[str, ...] = ()  # all metrics of a classification task
    labels: tuple[str, ...] | None = None  # names of the classes in order; None for scores and for language models
    facts: dict[str, int] = field(default_factory=dict)  # numbers of rows and tokens
    longest: int = 0  # tokens of the longest row
    rows: str = "one row for each example"  # how rows were made
    source: str = ""  # what reports call the data (see `source_name`)

    def checksum(self) -> int:
        """Return a checksum of all encoded rows, which tells data apart that have as many rows and tokens."""
        checksum = 0
        for rows in (self.train, *self.validation.values()):
            for table in rows.with_format("arrow").iter(BATCH_SIZE):
                checksum = zlib.crc32(repr(table.to_pydict()).encode(), checksum)
        return checksum

    @property
    def config_changes(self) -> dict[str, Any]:
        """What a new head needs in the model's config."""
        if self.task_type != "classification":
            return {}
        pad = self.tokenizer.pad_token_id
        padding = {} if pad is None else {"pad_token_id": pad}
        if self.labels is None:
            return {"num_labels": 1, "problem_type": "regression", **padding}
        return {
            "problem_type": "single_label_classification",
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
            **padding,
        }

    def check_labels(self, config: Any, model: str) -> None:
        """Raise a ValueError for a head that was trained with other labels, or with the same ones in another order.

        `config` is the one that the model was saved with, and `model` what the message calls it.
        """
        if not any("ForSequenceClassification" in architecture for architecture in config.architectures or ()):
            return
        if self.labels is None:
            if config.num_labels != 1:
                remedy = "Give data with classes, or a model without a head."
                raise ValueError(f"{model} was trained with {config.num_labels} classes; the data has scores. {remedy}")
            return
        names = [str(config.id2label[index]) for index in sorted(config.id2label)]
        generic = all(name == f"LABEL_{index}" for index, name in enumerate(names))
        numbers = list(self.labels) == [str(index) for index in range(len(self.labels))]
        same = [name.lower() for name in names] == [label.lower() for label in self.labels]
        if len(names) != len(self.labels) or not (generic or numbers or same):
            problem = f"{model} was trained with the labels {', '.join(names)}, in this order"
            remedy = "Give data with the model's labels, or a model without a head."
            raise ValueError(f"{problem}; the data has {', '.join(self.labels)}. {remedy}")

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of a Trainer that evaluates on this data."""
        single = len(self.validation) == 1
        return {
            "eval_dataset": next(iter(self.validation.values())) if single else self.validation,
            "data_collator": self.collator,
            "processing_class": self.tokenizer,
            "compute_metrics": self.compute_metrics if self.task_type == "classification" else None,
            "preprocess_logits_for_metrics": self.reduce_logits,
        }

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """Return predicted classes or scores `[B]` for logits `[B, C]`, or the first of a tuple of outputs."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.squeeze(-1).float() if self.labels is None else likeliest_classes(logits)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the metrics of a validation set of a classification task."""
        return compute_metrics(self.metric_names, prediction.predictions, prediction.label_ids)

    def constant_answer_score(self) -> float | None:
        """Return the first metric of always giving the same answer, or None where there are no metrics."""
        if not self.metric_names:
            return None
        return constant_answer_score(self.metric_names[0], next(iter(self.validation.values()))["labels"])

    def own_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the task's metrics of what `FinetuningTrainer.evaluate` returns, without the prefix `eval_`.

        Those of a language model are its loss over all predicted tokens with its standard error, and the perplexity; of
        embeddings, their mean cosine to those of the exact model.
        """
        values = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        scores = {name: value for name, value in values.items() if name.endswith(self.metric_names or ("loss",))}
        if self.task_type == "embedding":
            return {name.replace("loss", "cosine"): 1 - loss for name, loss in scores.items()} | scores
        if not self.metric_names:
            scores |= {f"{name[:-4]}perplexity": perplexity(loss) for name, loss in scores.items()}
            scores |= {name: value for name, value in values.items() if name.endswith("loss_stderr")}
        return scores


def collate_blocks(rows: list[Any]) -> dict[str, Tensor]:
    """Return a batch of blocks of equal length, which predict every next token."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class MaskingCollator(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` that masks at least one token of a batch: a mean over no token is NaN."""

    def torch_mask_tokens(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Mask tokens until there is a masked one (see `DataCollatorForLanguageModeling`)."""
        original = inputs.clone()
        for _ in range(100):
            masked, labels = super().torch_mask_tokens(original.clone(), *args, **kwargs)
            if bool((labels != IGNORED).any()):
                return masked, labels
        raise ValueError("A batch of special tokens has nothing to mask. Check the text or raise data.mlm_probability.")


def load_task_data(
    task_type: str, tokenizer: Any, data: DataConfig, seed: int, *, documents: Sequence[str] | None = None
) -> TaskData:
    """Turn what a person brings into rows of tokens to train on and rows that are held out, the same for every verb.

        rows = load_task_data("causal-lm", tokenizer, DataConfig(dataset="mine.txt", max_length=512), seed=0)
        rows.train[0]["input_ids"]
        for name, held_out in rows.validation.items():
            batch = rows.collator([held_out[0], held_out[1]])

    What rows are depends on the task type alone: of a `causal-lm` blocks of `data.max_length` tokens of joined
    documents, each beginning with what the tokenizer puts before a text (see `encode_blocks`); of a `masked-lm` or an
    `embedding` passages of single documents; of a `classification` one row an example, with `labels`; of a `seq2seq-lm`
    the tokens of one text column, with those of another one as `labels`. Held out are the
    validation splits of the data, or else a share of the training rows (see `hold_out`), which depends neither on a
    seed nor on the task type.

    Args:
        task_type: A key of `AUTO_CLASSES`.
        tokenizer: That of the model. It gets a padding token if it has none.
        data: Which data, and how much of it. `data.max_length` must be given.
        seed: That of the training rows that are drawn where `data.max_train_samples` limits them.
        documents: Texts in memory, in place of `data.dataset`.

    Raises:
        ValueError, OSError: Data that is missing, unreadable, or does not fit the task type.
        ImportError: The extra `train` is not installed.
    """
    datasets = import_datasets()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if data.task is None and data.dataset is None and documents is None:
        raise ValueError("There is no data: give data.task (a known task) or data.dataset (your own data).")
    if documents is not None and (data.task is not None or data.dataset is not None):
        raise ValueError(f"There are two kinds of data: documents, and {data.task or data.dataset!r}. Give only one.")
    if data.max_length is None:
        raise OptionError("data.max_length", "is missing: give the longest row in tokens.")
    if tokenizer.pad_token is None and task_type != "causal-lm":
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if task_type == "classification":
        if documents is not None:
            raise ValueError("Documents have no labels, which classification needs: give data.task or data.dataset.")
        return _classification(tokenizer, data, data.max_length, seed)
    if task_type == "seq2seq-lm":
        return _sequence_to_sequence(tokenizer, data, data.max_length, seed)
    return _language_model(task_type, tokenizer, data, data.max_length, seed, documents)


def _classification(tokenizer: Any, data: DataConfig, max_length: int, seed: int) -> TaskData:
    task, splits = load_labelled(data)
    names = tuple(dict.fromkeys(data.metrics or task.metrics))
    # An unknown name, or a metric for other labels, is an error now, and not after the first pass over the data.
    answers = [0.5, 1.5] if task.labels is None else range(len(task.labels))
    compute_metrics(names, answers, answers)
    task_data = TaskData(
        "classification",
        tokenizer,
        DataCollatorWithPadding(tokenizer),
        greater_is_better=higher_is_better(names[0]),
        metric_names=names,
        labels=task.labels,
        source=source_name(data),
    )
    _encode(task_data, splits, data, seed, lambda rows: encode_pairs(rows, tokenizer, task.columns, max_length))
    return task_data


def _sequence_to_sequence(tokenizer: Any, data: DataConfig, max_length: int, seed: int) -> TaskData:
    columns = data.text_columns
    if len(columns) != 2:
        listed = ", ".join(columns) or "none"
        raise OptionError("data.text_columns", f"of seq2seq-lm are two, the inputs and the targets, not {listed}.")
    task_data = TaskData("seq2seq-lm", tokenizer, DataCollatorForSeq2Seq(tokenizer), source=source_name(data))
    splits = load_splits(data, columns)
    _encode(task_data, splits, data, seed, lambda rows: encode_targets(rows, tokenizer, columns, max_length))
    return task_data


def _language_model(
    task_type: str, tokenizer: Any, data: DataConfig, length: int, seed: int, documents: Sequence[str] | None
) -> TaskData:
    column, causal = document_column(data), task_type == "causal-lm"
    collator: Any = collate_blocks if causal else DataCollatorWithPadding(tokenizer)
    if task_type == "masked-lm":
        if tokenizer.mask_token_id is None:
            name = type(tokenizer).__name__
            raise ValueError(f"{name} has no mask token: masked-lm needs the tokenizer of a masked LM.")
        collator = MaskingCollator(tokenizer, mlm_probability=data.mlm_probability)
    task_data = TaskData(task_type, tokenizer, collator)
    splits = load_splits(data, [column], documents)
    task_data.source = source_name(data, documents)
    task_data.rows = rows_text(sum(map(len, splits.values())), length, causal=causal)
    encode = encode_blocks if causal else encode_passages
    _encode(task_data, splits, data, seed, lambda rows: encode(rows, tokenizer, column, length))
    return task_data


def source_name(data: DataConfig, documents: Sequence[str] | None = None) -> str:
    """Return what reports call the data; of a path the last part."""
    if documents is not None:
        return "the given documents"
    if data.dataset is None:
        return f"task {data.task}"
    if data.dataset == PYTHON_DOCUMENTATION:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"docstrings of the standard library of Python {version}, one document per module"
    return Path(data.dataset).name if Path(data.dataset).exists() else data.dataset


def load_splits(data: DataConfig, columns: Sequence[str], documents: Sequence[str] | None = None) -> DatasetDict:
    """Load a data set with the splits `train` and `validation`, which is held out of `train` where there is none."""
    datasets = import_datasets()
    if data.dataset == PYTHON_DOCUMENTATION:
        documents = standard_library_documents()
    if documents is not None:
        splits = datasets.DatasetDict(train=datasets.Dataset.from_dict({columns[0]: [*documents]}))
    elif data.dataset is None:
        splits = load_task(str(data.task), folder=data.folder, revision=data.revision)
    else:
        hub = {"config": data.dataset_config, "revision": data.revision}
        splits = load_source(data.dataset, **hub, documents=data.documents, text_columns=data.text_columns)
    if "train" not in splits:
        raise ValueError(f"The data has no split 'train', only {', '.join(map(repr, splits))}.")
    for name in [name for name in splits if name != "train" and not name.startswith("validation")]:
        splits.pop(name)  # nothing is done with them, and test splits may have no labels
    check_columns(splits, columns)
    check_text(splits, [name for name in columns if name in data.text_columns], repr(data.dataset or data.task))
    if any(name.startswith("validation") for name in splits):
        return splits
    if len(splits["train"]) < MIN_DOCUMENTS and len(columns) == 1:
        parts = hold_out(splits["train"][columns[0]][:], data.validation_size)
        rows = [datasets.Dataset.from_dict({columns[0]: part}) for part in parts]
        return datasets.DatasetDict(dict(zip(("train", "validation"), rows, strict=True)))
    return hold_out_validation(splits, data.validation_size)


def document_column(data: DataConfig) -> str:
    """Return the text column of documents; an OptionError unless there is exactly one."""
    if len(data.text_columns) != 1:
        listed = ", ".join(data.text_columns) or "none"
        raise OptionError("data.text_columns", f"pairs are for classification; documents are one column, not {listed}.")
    return data.text_columns[0]


def read_documents(data: DataConfig) -> Text:
    """Read a text file, the column of a data set, or without a data set the documentation that comes with Python.

    The same documents are held out as by `load_task_data`.
    """
    column, path = document_column(data), None if data.dataset == PYTHON_DOCUMENTATION else data.dataset
    is_table = path is not None and file_suffix(Path(path)) in {*FORMATS} - {*TEXT_FORMATS}
    if path is None or (Path(path).is_file() and not is_table):
        if column != "text":
            raise OptionError("data.text_columns", f"a text has no columns, so no {column!r}. Leave this option out.")
        for name in ("dataset_config", "revision"):
            if getattr(data, name) is not None:
                raise OptionError(f"data.{name}", "is of a data set of the Hub, and this is a text. Leave it out.")
        return load_text(path, data.documents, data.validation_size)
    splits = load_splits(data, [column])
    validation = (text for name in splits if name.startswith("validation") for text in splits[name][column])
    return Text(Path(path).name if Path(path).exists() else path, tuple(splits["train"][column]), tuple(validation))


def load_labelled(data: DataConfig) -> tuple[Task, DatasetDict]:
    """Load the rows of a task, or of the user's own labelled data as a task, with the column `label`.

    Labels of one's own data are classes, unless they are floating-point numbers: scores. Raises as `load_splits` and
    `load_task`, and a ValueError for a label that is not in the training rows.
    """
    if data.task is not None:
        for name, default in (("text_columns", ("text",)), ("label_column", "label")):
            if getattr(data, name) != default:
                raise OptionError(f"data.{name}", f"is for your own data: {data.task!r} has its columns. Leave it out.")
        return TASKS.get(data.task), load_task(data.task, folder=data.folder, revision=data.revision)
    if len(data.text_columns) not in (1, 2):
        listed = ", ".join(data.text_columns) or "none"
        raise OptionError("data.text_columns", f"must be one column, or two for pairs, got {listed}.")
    if "label" in data.text_columns:
        raise OptionError("data.text_columns", "cannot be 'label', the column of the labels. Rename it in your file.")
    if data.label_column in data.text_columns:
        raise OptionError("data.label_column", f"{data.label_column!r} is a column of text. Name that of the labels.")
    datasets = import_datasets()
    splits = load_splits(data, (*data.text_columns, data.label_column))
    if data.label_column != "label":
        splits = splits.select_columns([*data.text_columns, data.label_column])
        splits = splits.rename_column(data.label_column, "label")
    feature = splits["train"].features["label"]
    labels: list[str] | None = getattr(feature, "names", None)
    for name, split in splits.items():
        if labels is not None and getattr(split.features["label"], "names", None) != labels:
            raise ValueError(
                f"The classes of the split {name!r} have other names, or another order, than those of the training "
                f"rows ({', '.join(labels)}). Give all splits the same ClassLabel."
            )
    if labels is None and not str(getattr(feature, "dtype", "")).startswith("float"):
        texts = splits.cast_column("label", datasets.Value("string"))
        pairs = {*zip(splits["train"]["label"], texts["train"]["label"], strict=True)} - {(None, None)}
        labels = [text for _, text in sorted(pairs)]
        if all(map(_CLASS_NUMBER.fullmatch, labels)):  # text that says which output of a head a class is
            labels.sort(key=lambda text: int(text.removeprefix("LABEL_")))
        if "" in labels:
            remedy = "Rows without a label cannot be trained on: remove them."
            raise ValueError(f"The column {data.label_column!r} of the training data has empty cells. {remedy}")
        other = [text for text in labels if not re.fullmatch(r"[-+]?\d*\.?\d+", text)]
        if other and (scores := [text for text in labels if text not in other and "." in text]):
            problem = f"The column {data.label_column!r} has numbers such as {scores[0]} and texts such as {other[0]!r}"
            raise ValueError(f"{problem}. Remove the rows of these, and the numbers are scores to predict.")
        unknown = {text for split in texts.values() for text in split["label"]} - {*labels, None}
        if unknown:
            listed = ", ".join(labels)
            raise ValueError(f"The label {min(unknown)!r} does not occur in the training data ({listed}).")
        splits = texts.cast_column("label", datasets.ClassLabel(names=labels))
    elif labels is None:
        splits = splits.cast_column("label", feature)  # scores of another split may be whole numbers only
    metrics = ("pearson", "spearmanr") if labels is None else ("accuracy",)
    names = None if labels is None else tuple(labels)
    return Task(Path(str(data.dataset)).name, data.text_columns, names, metrics), splits


def _encode(task: TaskData, splits: DatasetDict, data: DataConfig, seed: int, encode: Callable[[Any], Encoded]) -> None:
    """Encode the splits, cut to the requested number of rows: of a causal language model blocks, or passages."""
    blocks = task.task_type not in ("classification", "seq2seq-lm")  # a document gives several rows
    encoded = encode(splits["train"] if blocks else _draw(splits["train"], data.max_train_samples, seed))
    task.train = _draw(encoded.dataset, data.max_train_samples, seed)
    task.facts = {
        "train_rows": len(task.train),
        "train_tokens": sum(row_lengths(task.train)),
        "train_truncated": encoded.truncated,
        "train_dropped_tokens": encoded.dropped,
    }
    names = [name for name in splits if name.startswith("validation")]
    for name in names:
        # Rows are drawn because files are often sorted by label, with a fixed seed so that runs are comparable.
        rows = encode(splits[name] if blocks else _draw(splits[name], data.max_eval_samples, 0, in_order=True)).dataset
        rows = _draw(rows, data.max_eval_samples, 0, in_order=True)
        # Rows of similar length need less padding.
        lengths = row_lengths(rows)
        rows = rows.select(sorted(range(len(rows)), key=lengths.__getitem__))
        task.validation["" if len(names) == 1 else name.removeprefix("validation").lstrip("_")] = rows
        task.facts[f"{name}_rows"] = len(rows)
    trained = set(_row_hashes(task.train))
    repeated = (row in trained for rows in task.validation.values() for row in _row_hashes(rows))
    task.facts["validation_repeated"] = sum(repeated)
    every = (task.train, *task.validation.values())
    if not all(len(rows) for rows in every):
        raise ValueError(f"The data gives {task.facts}: there is nothing to train or to evaluate on.")
    task.longest = max(max(row_lengths(rows)) for rows in every)
    task.metric = "_".join(filter(None, (next(iter(task.validation)), *(task.metric_names or ("loss",))[:1])))


def _row_hashes(rows: Dataset) -> Iterator[int]:
    """Hash the tokens of each row."""
    for table in rows.with_format("arrow").iter(BATCH_SIZE):
        ids = table["input_ids"].combine_chunks()
        values, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
        yield from (hash(values[start:stop].tobytes()) for start, stop in pairwise(offsets))


def _draw(dataset: Dataset, size: int | None, seed: int, *, in_order: bool = False) -> Dataset:
    if size is None or size >= len(dataset):
        return dataset
    drawn = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    return dataset.select(sorted(drawn) if in_order else drawn)
