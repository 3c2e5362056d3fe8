"""Options of several commands: the data that they read (`--data.task`, …), the lengths that they time, budgets."""

from dataclasses import dataclass

from ..utils.options import OptionError, check_exclusive, check_options, option
from .files import Documents, Quoting

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

    task: str | None = option(None, "a task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, imdb", common=True)
    folder: str | None = option(None, "folder with the task's files (default: the Hub's)", common=True)
    dataset: str | None = option(
        None,
        "own data: a csv, tsv, json, jsonl, parquet or text file, a folder of them by split or of save_to_disk, a "
        f"Hub data set, or {PYTHON_DOCUMENTATION}",
        common=True,
    )
    dataset_config: str | None = option(None, "configuration of a data set of the Hub")
    revision: str | None = option(None, "branch, tag or commit of a data set of the Hub")
    text_columns: tuple[str, ...] = option(("text",), "text column of your own data, or two for pairs", common=True)
    label_column: tuple[str, ...] = option(
        ("label",), "label column of your own data, or one of 0 and 1 for each of several labels", common=True
    )
    documents: Documents = option(
        "auto",
        "documents of a text file: auto (parts between <|endoftext|>, WikiText articles, lines of .smi, else the whole "
        "file), paragraphs (separated by blank lines) or lines",
    )
    quoting: Quoting = option(
        "auto",
        "quotation marks in csv and tsv files: minimal (they delimit fields), none (they are text) or auto (csv: "
        "minimal; tsv: as the file shows)",
    )
    metrics: tuple[str, ...] | None = option(
        None, "metrics, the first one decides (default: the task's; else accuracy, f1_micro or pearson)"
    )
    max_length: int | None = option(
        None,
        "longest input, or block of a causal-lm, in tokens (default: the model's, up to 1,024; of plan: 512, "
        "encoders 256, tasks 128)",
        least=1,
    )
    max_train_samples: int | None = option(
        None, "number of training rows or blocks, drawn by the seed (default: all)", least=1
    )
    max_eval_samples: int | None = option(
        None, "number of validation rows, drawn once for all seeds (default: all)", least=1
    )
    validation_size: float = option(
        0.1, "share of the training rows to hold out where there is no validation split", above=0, below=1
    )
    group_by_length: bool = option(True, "batches of rows of similar length, which need less padding")
    mlm_probability: float = option(0.15, "share of the tokens that masked-lm predicts", above=0, below=1)

    def __post_init__(self) -> None:
        for name in ("text_columns", "label_column"):
            if isinstance(getattr(self, name), str):  # one column
                object.__setattr__(self, name, (getattr(self, name),))
        check_options(self)
        check_exclusive(self, "task", "dataset")
        if self.folder is not None and self.task is None:
            raise OptionError("folder", f"{self.folder!r} is the folder of a task's files: give the task, too.")


@dataclass(frozen=True)
class TimingConfig:
    """At which lengths `plan` and `convert` time their models (`evaluate` has `SpeedConfig`)."""

    lengths: tuple[int, ...] | None = option(
        None,
        "lengths to time, in tokens; []: none (plan, if left out: 1024 and 4096; quick: 1024)",
        least=16,
    )

    def __post_init__(self) -> None:
        check_options(self)
