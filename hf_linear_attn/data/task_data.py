"""The data of a task as a Trainer takes it: encoded rows, a collator, metrics; and what its model's head needs.

On its way through `convert` and `evaluate` a text has five shapes:

1. what a person brings: a file, a folder, a name on the Hub, or documents in memory (`DataConfig`);
2. columns of text and labels by splits (`files.Source`);
3. rows of token ids, to train on and held out (`TaskData`);
4. batches of tensors (`utils.models.Batch`), which the collator of the task makes of rows. It is called

   - for a training, by the loader of the Trainer or of the attention transfer (in `evaluate`, by
     `EvaluatedModel.training_batches`);
   - for a calibration or a choice, which read the first rows, by `TaskData.leading_batches`;
   - for a measurement, which reads the held-out rows, by `measure.metric.in_batches`.

   `utils.models.model_inputs` selects what the forward pass of a model has arguments for;
5. the numbers of a metric (`measure.metric.Numbers`), which a study stores, and a card or a report shows.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedConfig,
)

from ..utils.models import Batch, leading_batches
from ..utils.options import OptionError, default_of
from .config import PYTHON_DOCUMENTATION, DataConfig, TaskType
from .encoding import BATCH_SIZE, Encoded, encode_blocks, encode_pairs, encode_passages, encode_targets, row_lengths
from .files import Source, check_columns, check_text, import_datasets, load_source
from .labels import Head, Labels, encode_labels
from .metrics import DEFAULT_METRICS, check_metrics, compute_metrics, higher_is_better, perplexity
from .tasks import TASKS, load_task
from .text import MIN_DOCUMENTS, cut_end, describe_rows, standard_library_documents

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: Label of a token that is not to be predicted.
IGNORED = -100

#: Rows to train on, and rows that are held out: of fewer nothing can be said.
MIN_ROWS = 2


@dataclass(frozen=True)
class TaskData:
    """The encoded data of a task."""

    task_type: TaskType
    tokenizer: Any
    collator: Callable[[list[Any]], Batch]
    train: Dataset
    #: Rows that are measured on, from short to long, by a prefix of metrics' names; one set is `{"": rows}`.
    held_out: Mapping[str, Dataset]
    facts: Mapping[str, int]  # numbers of rows and tokens
    longest: int  # tokens of the longest row
    row_summary: str  # how rows were made
    name: str  # what reports call the data (see `data_name`)
    notes: tuple[str, ...] = ()  # what was assumed to read the data, one sentence each
    labels: Labels | None = None  # of a classification task
    metric_names: tuple[str, ...] = ()  # all metrics of a classification task, the one that decides first

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the inputs of a decoder are made of the labels of a row."""
        return self.task_type == "seq2seq-lm"

    @property
    def best_step_metric(self) -> str:
        """The number that decides which step of a training is the best."""
        name = self.metric_names[0] if self.metric_names else "loss"
        return "_".join(filter(None, (next(iter(self.held_out)), name)))

    @property
    def greater_is_better(self) -> bool:
        """Whether more of that number is better."""
        return bool(self.metric_names) and higher_is_better(self.metric_names[0])

    @property
    def held_out_facts(self) -> dict[str, int]:
        """What the held-out rows really are: their number, their tokens, the longest."""
        lengths = [*chain.from_iterable(map(row_lengths, self.held_out.values()))]
        return {"sequences": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}

    @property
    def summary(self) -> str:
        """What the data are, for a person to read."""
        facts, held_out = self.facts, self.held_out_facts
        train = f"{facts['train_rows']:,} rows of {facts['train_tokens']:,} tokens to train on"
        measured = (
            f"{held_out['sequences']:,} of {held_out['tokens']:,} tokens (longest {held_out['longest']:,}) held out"
        )
        return f"{self.name}: {self.row_summary}; {train}, {measured}"

    def report(self, limit: str) -> list[str]:
        """Return what the data are, and what a person should know of them, as lines that every verb logs.

        `limit` says what decides the length that rows are cut to.
        """
        facts, held_out = self.facts, self.held_out_facts["sequences"]
        length = f"{self.longest:,} tokens ({limit})"
        lines = [f"Data: {self.summary}", *self.notes]
        if truncated := facts["train_truncated"]:
            lost = facts["train_dropped_tokens"] / (facts["train_dropped_tokens"] + facts["train_tokens"])
            cut = f"{truncated:,} of {facts['train_rows']:,} training rows are cut to {length}"
            lines.append(f"{cut}; they lose {100 * lost:.1f} % of all tokens.")
        if truncated := facts["validation_truncated"]:
            lines.append(f"{truncated:,} of {held_out:,} held-out rows are cut to {length}.")
        if repeated := facts["validation_repeated"]:
            repetition = f"{repeated:,} of {held_out:,} held-out rows are in the training data, too"
            lines.append(f"{repetition}: their scores say little of new inputs.")
        return lines

    def checksum(self) -> int:
        """Return a checksum of all encoded rows, which tells data apart that have as many rows and tokens."""
        checksum = 0
        for rows in (self.train, *self.held_out.values()):
            for table in rows.with_format("arrow").iter(BATCH_SIZE):
                checksum = zlib.crc32(repr(table.to_pydict()).encode(), checksum)
        return checksum

    @property
    def config_changes(self) -> dict[str, Any]:
        """What a head needs in the model's config."""
        if self.labels is None:
            return {}
        pad = self.tokenizer.pad_token_id
        changes = {"problem_type": self.labels.problem, **({} if pad is None else {"pad_token_id": pad})}
        if self.labels.names is None:  # scores
            return {"num_labels": 1, **changes}
        names = dict(enumerate(self.labels.names))
        return {"id2label": names, "label2id": {label: index for index, label in names.items()}, **changes}

    def inputs(self, rows: Dataset) -> Dataset:
        """Return rows as a training without a task's loss reads them: without labels, unless a decoder reads these."""
        return rows.select_columns([name for name in rows.column_names if name != "labels" or self.is_encoder_decoder])

    def longer_than(self, rows: Dataset, length: int) -> Dataset:
        """Return the rows of more than so many tokens, for the encoder or for the decoder."""
        lengths = row_lengths(rows)
        if self.is_encoder_decoder:
            lengths = [*map(max, lengths, row_lengths(rows, "labels"))]
        return rows.select([row for row, tokens in enumerate(lengths) if tokens > length])

    def leading_batches(self, rows: Iterable[Any], tokens: int) -> list[Batch]:
        """Return the first of some rows, each as a batch, until they have so many tokens together.

        What the collator draws at random, as the masked tokens of `masked-lm`, it always draws from the same seed.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return leading_batches((self.collator([row]) for row in rows), tokens)

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of a Trainer that evaluates on this data."""
        single = len(self.held_out) == 1
        return {
            "eval_dataset": next(iter(self.held_out.values())) if single else dict(self.held_out),
            "data_collator": self.collator,
            "processing_class": self.tokenizer,
            "compute_metrics": None if self.labels is None else self.compute_metrics,
            "preprocess_logits_for_metrics": self.reduce_logits,
        }

    def reduce_logits(self, logits: Any, labels: Tensor) -> Tensor:
        """Return what the head answers (see `Labels.answers`) for logits, or the first of a tuple of outputs."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits if self.labels is None else self.labels.answers(logits)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the metrics of a held-out set of a classification task."""
        assert self.labels is not None
        answers = (self.labels.in_order(values) for values in (prediction.predictions, prediction.label_ids))
        return compute_metrics(self.metric_names, *answers)

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


@dataclass(frozen=True)
class RowFormat:
    """What a task type makes of text: how a split becomes rows, and rows become batches."""

    encode: Callable[..., Encoded]  # of a split, with a `tokenizer` and a `max_length`
    collator: Callable[[list[Any]], Batch]
    summary: str = "one row for each example"  # how rows are made
    cuts_documents: bool = False  # a document gives several rows
    labels: Labels | None = None  # of a classification
    metric_names: tuple[str, ...] = ()  # of a classification


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
        raise ValueError(
            "A batch of special tokens has nothing to mask. Check the text, or raise --data.mlm_probability."
        )


def load_task_data(
    task_type: TaskType,
    tokenizer: Any,
    data: DataConfig,
    seed: int,
    *,
    documents: Sequence[str] | None = None,
    head: PreTrainedConfig | None = None,
) -> TaskData:
    """Turn what a person brings into rows of tokens to train on and rows that are held out, the same for every verb.

        loaded = load_task_data("causal-lm", tokenizer, DataConfig(dataset="mine.txt", max_length=512), seed=0)
        loaded.train[0]["input_ids"]
        for name, rows in loaded.held_out.items():
            batch = loaded.collator([rows[0], rows[1]])

    What rows are depends on the task type alone: of a `causal-lm` blocks of `data.max_length` tokens of joined
    documents, each beginning with what the tokenizer puts before a text (see `encode_blocks`); of a `masked-lm` or an
    `embedding` passages of single documents; of a `classification` one row an example, with `labels`; of a `seq2seq-lm`
    one row an example, whose `labels` are the tokens of the second text column. Held out are the validation splits of
    the data, or else a share of the training rows, which does not depend on a seed, nor, from ten rows on, on the task
    type (see `hold_out`). `TaskData.report` says what was assumed of the data.

    Args:
        task_type: What the model is for.
        tokenizer: That of the model. It gets a padding token if it has none.
        data: Which data, and how much of it. `data.max_length` must be given.
        seed: That of the training rows that are drawn where `data.max_train_samples` limits them.
        documents: Texts in memory, in place of `data.dataset`.
        head: The config of a model with a classification head: labels are numbered as its outputs (see
            `encode_labels`). None: the head is to be new.

    Raises:
        ValueError, OSError: Data that is missing, unreadable, or does not fit the task type or the head; fewer than two
            rows to train on or held out.
        ImportError: The extra `train` is not installed.
    """
    if data.task is None and data.dataset is None and documents is None:
        raise ValueError("There is no data: give --data.task (a known task) or --data.dataset (your own data).")
    if documents is not None and (data.task is not None or data.dataset is not None):
        raise ValueError(f"There are two kinds of data: documents, and {data.task or data.dataset!r}. Give only one.")
    if data.max_length is None:
        raise OptionError("data.max_length", "is missing: give the longest row in tokens.")
    if tokenizer.pad_token is None and task_type != "causal-lm":
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if task_type == "classification":
        if documents is not None:
            raise ValueError("Documents have no labels, which classification needs: give --data.dataset.")
        source, form = _labelled_examples(tokenizer, data, head)
    elif task_type == "seq2seq-lm":
        source, form = _pairs_of_texts(tokenizer, data)
    else:
        source, form = _documents(task_type, tokenizer, data, documents)
    splits = hold_out(source.splits, data.validation_size)
    encode = partial(_encode, form, tokenizer=tokenizer, max_length=data.max_length)
    train = encode(splits["train"], partial(_draw, size=data.max_train_samples, seed=seed))
    # Rows are drawn because files are often sorted by label, with a fixed seed so that runs are comparable.
    draw = partial(_draw, size=data.max_eval_samples, seed=0, in_order=True)
    encoded = {name: encode(split, draw) for name, split in splits.items() if name.startswith("validation")}
    held_out = {name: _by_length(part.dataset) for name, part in encoded.items()}
    every, name = (train.dataset, *held_out.values()), data_name(data, documents)
    if any(len(rows) < MIN_ROWS for rows in every):
        counts = f"{len(train.dataset)} rows to train on and {min(map(len, held_out.values()))} held out"
        remedy = f"At least {MIN_ROWS} of each are needed: give more data, or shorter rows (--data.max_length)."
        raise ValueError(f"{name} gives {counts}. {remedy}")
    return TaskData(
        task_type,
        tokenizer,
        form.collator,
        train.dataset,
        {_prefix(split, held_out): rows for split, rows in held_out.items()},
        _facts(train, encoded),
        longest=max(max(row_lengths(rows)) for rows in every),
        row_summary=form.summary,
        name=name,
        notes=source.notes,
        labels=form.labels,
        metric_names=form.metric_names,
    )


def _encode(form: RowFormat, split: Dataset, draw: Callable[[Dataset], Dataset], **options: Any) -> Encoded:
    """Encode a split, of which some rows are drawn: of examples before, of parts of documents afterwards."""
    if form.cuts_documents:
        encoded = form.encode(split, **options)
        return replace(encoded, dataset=draw(encoded.dataset))
    return form.encode(draw(split), **options)


def _labelled_examples(tokenizer: Any, data: DataConfig, head: PreTrainedConfig | None) -> tuple[Source, RowFormat]:
    source, columns, labels, metrics = load_labelled(data, head)
    names = tuple(dict.fromkeys(data.metrics or metrics))
    # An unknown name, or a metric for other labels, is an error now, and not after the first pass over the data.
    check_metrics(names, labels.problem)
    if labels.problem == "single_label_classification":
        compute_metrics(names, *[range(len(labels.outputs))] * 2)
    encode = partial(encode_pairs, columns=columns)
    return source, RowFormat(encode, DataCollatorWithPadding(tokenizer), labels=labels, metric_names=names)


def _pairs_of_texts(tokenizer: Any, data: DataConfig) -> tuple[Source, RowFormat]:
    columns = text_columns(data, 2, wanted="two for seq2seq-lm, of inputs and of targets")
    return load_columns(data, columns), RowFormat(
        partial(encode_targets, columns=columns), DataCollatorForSeq2Seq(tokenizer)
    )


def _documents(
    task_type: TaskType, tokenizer: Any, data: DataConfig, documents: Sequence[str] | None
) -> tuple[Source, RowFormat]:
    (column,), causal = text_columns(data, 1, wanted="one column of documents"), task_type == "causal-lm"
    collator: Any = collate_blocks if causal else DataCollatorWithPadding(tokenizer)
    if task_type == "masked-lm":
        if tokenizer.mask_token_id is None:
            name = type(tokenizer).__name__
            raise ValueError(f"{name} has no mask token: masked-lm needs the tokenizer of a masked LM.")
        collator = MaskingCollator(tokenizer, mlm_probability=data.mlm_probability)
    source = load_columns(data, [column], documents)
    summary = describe_rows(sum(map(len, source.splits.values())), cast(int, data.max_length), causal=causal)
    encode = partial(encode_blocks if causal else encode_passages, text_column=column)
    return source, RowFormat(encode, collator, summary, cuts_documents=True)


def data_name(data: DataConfig, documents: Sequence[str] | None = None) -> str:
    """Return what reports call the data; of a path the last part."""
    if documents is not None:
        return "the given documents"
    if data.dataset is None:
        return f"task {data.task}"
    if data.dataset == PYTHON_DOCUMENTATION:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"docstrings of the standard library of Python {version}, one document per module"
    return Path(data.dataset).name if Path(data.dataset).exists() else data.dataset


def load_splits(data: DataConfig, columns: Sequence[str]) -> Source:
    """Load those columns of a data set, with the split `train` and those that are held out (see `hold_out`)."""
    source = load_columns(data, columns)
    return replace(source, splits=hold_out(source.splits, data.validation_size))


def load_columns(
    data: DataConfig, texts: Sequence[str], documents: Sequence[str] | None = None, labels: Sequence[str] = ()
) -> Source:
    """Load columns of texts and of labels from the splits that a data set has, and check that the texts are text."""
    columns = [*texts, *labels]
    datasets = import_datasets()
    if data.dataset == PYTHON_DOCUMENTATION:
        documents = standard_library_documents()
    if documents is not None:
        source = Source(datasets.DatasetDict(train=datasets.Dataset.from_dict({columns[0]: [*documents]})))
    elif data.dataset is None:
        source = load_task(str(data.task), folder=data.folder, revision=data.revision)
    else:
        hub = {"config": data.dataset_config, "revision": data.revision}
        source = load_source(data.dataset, **hub, split_by=data.documents, quoting=data.quoting)
    check_columns(source.splits, columns, labels)
    check_text(source, texts)
    notes = source.notes
    if unused := [name for name in source.splits["train"].column_names if name not in columns]:
        notes = (*notes, f"Columns that are not used: {', '.join(unused)}.")
    return replace(source, splits=source.splits.select_columns(columns), notes=notes)


def hold_out(splits: DatasetDict, share: float) -> DatasetDict:
    """Return a data set with a share of `train` as the split `validation`, unless it has one.

    It is at least two rows, which depend on nothing but the number of rows: what one command trains on, no other one
    measures on. But fewer than ten rows of a single column are running text, of which the end with that share of the
    characters is held out, perhaps as a single row. A ValueError if no row would be left to train on.
    """
    train = splits["train"]
    if len(splits) > 1:
        return splits
    has_no_labels = len(train.column_names) == 1
    if len(train) < MIN_DOCUMENTS and has_no_labels:
        datasets, (column,) = import_datasets(), train.column_names
        before, end = (datasets.Dataset.from_dict({column: part}) for part in cut_end(train[column][:], share))
        return datasets.DatasetDict(train=before, validation=end)
    count = max(MIN_ROWS, round(share * len(train)))
    if count >= len(train):
        problem = f"{count} of {len(train)} rows cannot be held out for validation"
        raise ValueError(f"{problem}. Give more rows, or a file for validation.")
    chosen = sorted(random.Random(0).sample(range(len(train)), count))
    rest = train.select(sorted({*range(len(train))} - {*chosen}))
    return import_datasets().DatasetDict(train=rest, validation=train.select(chosen))


def input_columns(data: DataConfig) -> tuple[str, ...]:
    """Return the columns of text: of a task its own, else those that are named."""
    return data.text_columns if data.task is None else TASKS.get(data.task).columns


def text_columns(data: DataConfig, *counts: int, wanted: str) -> tuple[str, ...]:
    """Return the columns of text; an OptionError, which says what is wanted, unless there are so many."""
    if len(data.text_columns) not in counts:
        listed = ", ".join(data.text_columns) or "none"
        raise OptionError("data.text_columns", f"must be {wanted}, not {listed}. Name what the data has.")
    return data.text_columns


def load_labelled(
    data: DataConfig, head: PreTrainedConfig | None = None
) -> tuple[Source, tuple[str, ...], Labels, tuple[str, ...]]:
    """Load the rows of a task, or of the user's own labelled data, with the column `label` (see `encode_labels`).

    Returns the rows, their text columns, what the labels are, and the metrics of the task. Raises as `load_columns`,
    `load_task` and `encode_labels`.
    """
    label_columns = data.label_column
    metrics = tuple[str, ...]()
    if data.task is not None:
        for name in ("text_columns", "label_column"):
            if vars(data)[name] != default_of(DataConfig, name):
                raise OptionError(f"data.{name}", f"is for your own data: {data.task!r} has its columns. Leave it out.")
        task = TASKS.get(data.task)
        columns, label_columns, metrics = task.columns, ("label",), task.metrics
    else:
        columns = text_columns(data, 1, 2, wanted="one column, or two for pairs")
        if "label" in columns:
            raise OptionError("data.text_columns", "cannot be 'label', the column of the labels. Rename it.")
        if shared := [name for name in label_columns if name in columns]:
            raise OptionError("data.label_column", f"{shared[0]!r} is a column of text. Name that of the labels.")
    source = load_columns(data, columns, labels=label_columns)
    splits, labels = encode_labels(source, label_columns, None if head is None else Head.of(head))
    return (
        replace(source, splits=splits, notes=(*source.notes, *labels.notes)),
        columns,
        labels,
        metrics or DEFAULT_METRICS[labels.problem],
    )


def _by_length(rows: Dataset) -> Dataset:
    """Return rows from short to long: those of similar length need less padding."""
    lengths = row_lengths(rows)
    return rows.select(sorted(range(len(rows)), key=lengths.__getitem__))


def _facts(train: Encoded, held_out: Mapping[str, Encoded]) -> dict[str, int]:
    """Return the numbers of rows and tokens, and how many of the held-out rows are among those to train on."""
    trained = set(_row_hashes(train.dataset))
    hashes = chain.from_iterable(_row_hashes(part.dataset) for part in held_out.values())
    dropped = {} if train.dropped is None else {"train_dropped_tokens": train.dropped}
    return {
        "train_rows": len(train.dataset),
        "train_tokens": sum(row_lengths(train.dataset)),
        "train_truncated": train.truncated,
        **dropped,
        **{f"{split}_rows": len(part.dataset) for split, part in held_out.items()},
        "validation_truncated": sum(part.truncated for part in held_out.values()),
        "validation_repeated": sum(row in trained for row in hashes),
    }


def _prefix(split: str, held_out: Mapping[str, Dataset]) -> str:
    """Return the prefix of metrics of a held-out split: `matched` of `validation_matched`, and none of the only one."""
    return "" if len(held_out) == 1 else split.removeprefix("validation").lstrip("_")


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
