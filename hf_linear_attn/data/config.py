"""Options of several commands: the data that they read (`--data.task`, …), the lengths that they time, budgets."""

from dataclasses import dataclass
from typing import Literal

from ..utils.options import OptionError, check_exclusive, check_options, option
from .files import DocumentSplit, Quoting

TaskType = Literal["classification", "causal-lm", "masked-lm", "embedding", "seq2seq-lm"]
"""What a model is for, which decides its class, its rows and its metric."""

#: What a budget may be, in the help of `plan` and `convert`.
BUDGETS = (
    "'1% perplexity', '0.05 nats', '0.5 points', '0.02 cosine', '90% recall at 2048', '2x at 4096' or "
    "'25% cache at 8192'"
)


#: As `dataset`: the documentation that comes with Python, one document per module.
PYTHON_DOCUMENTATION = "python-documentation"


@dataclass(frozen=True)
class DataConfig:
    """Which data a command reads, and how it is truncated."""

    task: str | None = option(None, "a task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, imdb")
    folder: str | None = option(None, "folder with the task's files (default: the Hub's)")
    dataset: str | None = option(
        None,
        "own data: a csv, tsv, json, jsonl, parquet or text file, a folder of them by split or of save_to_disk, a "
        f"Hub data set, or {PYTHON_DOCUMENTATION}",
    )
    dataset_config: str | None = option(None, "configuration of a data set of the Hub")
    revision: str | None = option(None, "branch, tag or commit of a data set of the Hub")
    text_columns: tuple[str, ...] = option(("text",), "text column of your own data, or two for pairs")
    label_column: tuple[str, ...] = option(("label",), "label column of your own data, or columns of 0 and 1")
    documents: DocumentSplit = option(
        "auto",
        "of a text file: auto (parts between <|endoftext|>, or all of it), paragraphs, lines",
    )
    quoting: Quoting = option(
        "auto", "quotation marks delimit fields (minimal) or are text (none); auto: as a tsv shows"
    )
    metrics: tuple[str, ...] | None = option(
        None, "metrics, the first one decides (default: the task's, or what suits the labels)"
    )
    max_length: int | None = option(
        None,
        "longest input, or block of a causal-lm, in tokens (default: the model's, up to 1,024)",
        least=1,
    )
    max_train_samples: int | None = option(
        None, "number of training rows or blocks, drawn by the seed (default: all)", least=1
    )
    max_eval_samples: int | None = option(
        None,
        "number of validation rows, drawn once for all seeds (default: labelled rows all, 65,536 tokens of text)",
        least=1,
    )
    validation_size: float = option(
        0.1, "share of the training rows to hold out where there is no validation split", above=0, below=1
    )
    mlm_probability: float = option(0.15, "share of the tokens that masked-lm predicts", above=0, below=1)

    def __post_init__(self) -> None:
        for name, columns in (("text_columns", self.text_columns), ("label_column", self.label_column)):
            if isinstance(columns, str):  # one column
                object.__setattr__(self, name, (columns,))
        check_options(self)
        check_exclusive(self, "task", "dataset")
        if self.folder is not None and self.task is None:
            raise OptionError("folder", f"{self.folder!r} is the folder of a task's files: give the task, too.")


@dataclass(frozen=True)
class TimingConfig:
    """At which lengths `convert` times its models (`evaluate` has `SpeedConfig`)."""

    lengths: tuple[int, ...] | None = option(
        None,
        "lengths to time, in tokens; none without a value",
        least=16,
    )

    def __post_init__(self) -> None:
        check_options(self)
