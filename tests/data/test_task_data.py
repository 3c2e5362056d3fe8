"""Collators and metrics of task data. Loading is tested by the conversions that use it."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import BertConfig, EvalPrediction

from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.data.labels import Labels
from hf_linear_attn.data.task_data import (
    MaskingCollator,
    TaskData,
    collate_blocks,
    input_columns,
    load_labelled,
    load_splits,
    load_task_data,
)
from hf_linear_attn.utils.options import OptionError
from tests.data.tiny_data import tokenizer, write
from tests.tiny_text import sample_text


def task_data(task_type: str, labels: Labels | None = None, metric_names: tuple[str, ...] = ()) -> TaskData:
    rows = Dataset.from_dict({"input_ids": [[5, 6], [7]]})
    made = {"train": rows, "held_out": {"": rows}, "facts": {}, "longest": 2, "row_summary": "made", "name": "memory"}
    return TaskData(task_type, tokenizer(), collate_blocks, **made, labels=labels, metric_names=metric_names)


def test_blocks_predict_every_next_token():
    batch = collate_blocks([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 5]}])
    assert batch["labels"].tolist() == batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_at_least_one_token_is_masked():
    tok = tokenizer()
    rows = [{"input_ids": tok("alpha beta gamma")["input_ids"]}, {"input_ids": tok("one")["input_ids"]}]
    special = torch.tensor(tok.all_special_ids)
    for seed in range(10):
        torch.manual_seed(seed)
        batch = MaskingCollator(tok, mlm_probability=0.02)(rows)
        masked = batch["labels"] != -100
        assert int(masked.sum()) >= 1
        assert not bool(torch.isin(batch["labels"][masked], special).any())
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_leading_batches_mask_the_same_tokens_whatever_was_drawn_before():
    data = replace(task_data("masked-lm"), collator=MaskingCollator(tokenizer(), mlm_probability=0.5))
    rows = [{"input_ids": [*range(5, 45)]} for _ in range(3)]
    batches = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        batches.append(data.leading_batches(rows, tokens=80))
        assert torch.equal(torch.get_rng_state(), state)
    assert len(batches[0]) == 2
    for first, second in zip(*batches, strict=True):
        assert torch.equal(first["labels"], second["labels"])


def test_a_batch_without_ordinary_tokens_is_an_error():
    tok = tokenizer()
    with pytest.raises(ValueError, match="nothing to mask"):
        MaskingCollator(tok, mlm_probability=0.5)([{"input_ids": [tok.cls_token_id, tok.sep_token_id]}])


def test_the_metrics_of_a_language_model_are_loss_and_perplexity():
    data = task_data("causal-lm")
    assert data.trainer_arguments()["compute_metrics"] is None
    assert data.own_metrics({"eval_loss": 2.0, "eval_runtime": 3.0}) == {"loss": 2.0, "perplexity": math.exp(2.0)}
    both = data.own_metrics({"eval_a_loss": 1.0, "eval_b_loss": 800.0})
    assert both == {"a_loss": 1.0, "b_loss": 800.0, "a_perplexity": math.e, "b_perplexity": math.exp(700.0)}


def test_predictions_of_classes_and_scores():
    logits = torch.tensor([[0.1, 0.9], [2.0, -1.0]])
    two = Labels("single_label_classification", ("a", "b"))
    classes = task_data("classification", two, metric_names=("accuracy",))
    assert classes.reduce_logits((logits, None), torch.tensor([1, 1])).tolist() == [1, 0]
    assert classes.compute_metrics(EvalPrediction(np.array([1, 0]), np.array([1, 1]))) == {"accuracy": 0.5}
    scores = task_data("classification", Labels("regression"), metric_names=("pearson",))
    assert scores.reduce_logits(logits[:, :1], torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0.1, 2.0])
    assert scores.config_changes["num_labels"] == 1
    assert classes.config_changes["id2label"] == {0: "a", 1: "b"}


def test_predictions_of_several_labels():
    several = Labels("multi_label_classification", ("a", "b", "c"))
    data = task_data("classification", several, metric_names=("subset_accuracy", "f1_micro"))
    logits = torch.tensor([[0.1, -0.9, 2.0], [-2.0, -1.0, math.nan]])
    assert data.reduce_logits(logits, logits).tolist() == [[1, 0, 1], [0, 0, -1]]
    right, wrong = np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 1.0, 0.0]])
    assert data.compute_metrics(EvalPrediction(right, right)) == {"subset_accuracy": 1.0, "f1_micro": 1.0}
    assert data.compute_metrics(EvalPrediction(wrong, right)) == {"subset_accuracy": 0.0, "f1_micro": 0.5}
    assert data.config_changes["problem_type"] == "multi_label_classification"


def test_own_metrics_leave_out_what_the_trainer_adds():
    two = Labels("single_label_classification", ("a", "b"), (0, 1))
    data = task_data("classification", two, metric_names=("accuracy", "f1"))
    metrics = {"eval_matched_accuracy": 0.5, "eval_f1": 0.25, "eval_loss": 1.0, "eval_runtime": 3.0, "epoch": 1.0}
    assert data.own_metrics(metrics) == {"matched_accuracy": 0.5, "f1": 0.25}


def test_metrics_and_heads_for_other_labels_are_refused(tmp_path):
    """Before anything is trained or measured: scores have no accuracy, and three classes no F1 of class 1."""
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    scores = "".join(f"one two,{row}.5\n" for row in range(12))
    classes = "".join(f"one two,{row % 3}\n" for row in range(12))
    folder = write(tmp_path, {"scores.csv": f"text,label\n{scores}", "classes.csv": f"text,label\n{classes}"})

    def load(name, *metrics, head=None):
        data = DataConfig(dataset=str(folder / name), metrics=metrics or None, max_length=8)
        return load_task_data("classification", tokenizer(), data, 0, head=head)

    for metrics in (("accuracy",), ("pearson", "accuracy"), ("matthews_correlation",)):
        with pytest.raises(ValueError, match=f"{metrics[-1]} is for classes, and these labels are scores"):
            load("scores.csv", *metrics)
    with pytest.raises(ValueError, match="f1 is defined for the classes 0 and 1; these rows have 2"):
        load("classes.csv", "accuracy", "f1")
    with pytest.raises(ValueError, match=r"trained with classes \(LABEL_0, LABEL_1, LABEL_2\); the data has scores"):
        load("scores.csv", head=BertConfig(num_labels=3))
    assert load("scores.csv", head=BertConfig(num_labels=1)).labels.names is None
    assert (
        load("classes.csv", head=BertConfig(num_labels=1)).labels.problem == "regression"
    )  # whole numbers are scores, too


def test_own_labelled_data_are_a_task(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    folder = write(
        tmp_path,
        {"train.csv": "review,label,stars\na,9,good\nb,9,bad\n", "dev.csv": "review,label,stars\nc,9,good\n"},
    )
    data = DataConfig(dataset=str(folder), text_columns=("review",), label_column="stars")
    source, columns, labels, metrics = load_labelled(data)
    assert (labels.names, columns, metrics) == (("bad", "good"), ("review",), ("accuracy",))
    assert source.splits["train"]["label"][:] == [1, 0]
    assert source.splits["validation"]["label"][:] == [1]
    assert source.notes == ("Columns that are not used: label.",)


def test_a_column_of_another_order_and_a_test_file_without_labels_are_no_errors(tmp_path):
    """As competitions give them."""
    train = "id,text,label\n" + "".join(f"{row},alpha {row},{row % 2}\n" for row in range(8))
    files = {"train.csv": train, "dev.csv": "label,text\n1,beta\n0,gamma\n", "test.csv": "id,text\n9,delta\n"}
    data = load_task_data(
        "classification", tokenizer(), DataConfig(dataset=str(write(tmp_path, files)), max_length=8), 0
    )
    assert sorted(data.held_out[""]["labels"][:]) == [0, 1]
    assert data.notes == ("Columns that are not used: id.",)


@pytest.mark.parametrize("form", ["{}", "LABEL_{}", "{:02}", " {}"])
def test_classes_that_are_numbers_as_text_are_in_their_order(form, tmp_path):
    """A head whose classes have no names of their own has them in this order."""
    names = [form.format(number) for number in range(12)]
    rows = [{"text": f"t{row}", "label": names[row * 5 % 12]} for row in range(60)]
    write(tmp_path, {"rows.jsonl": "\n".join(map(json.dumps, rows))})
    source, _, labels, _ = load_labelled(DataConfig(dataset=str(tmp_path / "rows.jsonl")))
    assert labels.names == tuple(names)
    for split in source.splits.values():
        assert all(row["label"] == int(row["text"][1:]) * 5 % 12 for row in split)


def test_the_end_of_a_running_text_is_held_out(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    numbers = [str(index) for index in range(1000)]
    (tmp_path / "book.txt").write_text("\n\n" + " ".join(numbers) + "\n\nend")
    splits = load_splits(DataConfig(dataset=str(tmp_path / "book.txt"), validation_size=0.25), ("text",)).splits
    train, validation = splits["train"]["text"][0].split(), splits["validation"]["text"][0].split()
    assert [*train, *validation] == [*numbers, "end"]
    assert len(" ".join(validation)) / len(" ".join(numbers)) == pytest.approx(0.25, abs=0.01)


def test_the_tokens_to_train_on_are_those_of_the_rows_that_are_drawn(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    (tmp_path / "lines.txt").write_text(sample_text(), encoding="utf-8")
    data = DataConfig(dataset=str(tmp_path / "lines.txt"), documents="lines", max_length=16, max_train_samples=3)
    for task_type in ("causal-lm", "masked-lm"):
        encoded = load_task_data(task_type, tokenizer(), data, seed=0)
        facts = encoded.facts
        assert (facts["train_rows"], facts["train_tokens"]) == (3, sum(map(len, encoded.train["input_ids"])))


def test_validation_rows_that_are_in_the_training_data_are_counted(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    train = "text,label\n" + "".join(f"alpha {row % 7} beta,{row % 2}\n" for row in range(20))
    folder = write(tmp_path, {"train.csv": train, "dev.csv": "text,label\nalpha 3 beta,1\ngamma,0\nalpha 3,1\n"})
    encoded = load_task_data("classification", tokenizer(), DataConfig(dataset=str(folder), max_length=8), seed=0)
    assert encoded.facts["validation_repeated"] == 1
    drawn = DataConfig(dataset=str(folder / "train.csv"), validation_size=0.25, max_length=8)
    assert load_task_data("classification", tokenizer(), drawn, seed=0).facts["validation_repeated"] == 5


def test_the_report_says_what_is_cut_and_what_is_repeated(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    rows = "text,label\nalpha,0\nalpha beta gamma delta one,1\n"
    folder = write(tmp_path, {"train.csv": rows + "beta beta,0\n", "dev.csv": rows})
    loaded = load_task_data("classification", tokenizer(), DataConfig(dataset=str(folder), max_length=5), seed=0)
    first, *others = loaded.report("the model's limit")
    assert first.startswith(f"Data: {folder.name}: one row for each example; 3 rows of 12 tokens to train on")
    assert others == [
        "1 of 3 training rows are cut to 5 tokens (the model's limit); they lose 14.3 % of all tokens.",
        "1 of 2 held-out rows are cut to 5 tokens (the model's limit).",
        "2 of 2 held-out rows are in the training data, too: their scores say little of new inputs.",
    ]


def test_a_task_has_its_own_columns_of_text():
    assert input_columns(DataConfig(task="sst2")) == ("sentence",)
    assert input_columns(DataConfig(dataset="x.csv", text_columns=("a", "b"))) == ("a", "b")


@pytest.mark.parametrize("task_type", ["classification", "causal-lm", "masked-lm", "embedding"])
def test_what_is_no_text_is_named(task_type, tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")

    def load(data: DataConfig) -> object:
        return load_task_data(task_type, tokenizer(), data, 0)

    rows = [{"text": f"alpha beta {row}", "number": row, "label": row % 2} for row in range(12)]
    for row, value in ((0, None), (7, None), (5, 7.5), (5, ["alpha"])):
        wrong = [{**entry, "text": value if index == row else entry["text"]} for index, entry in enumerate(rows)]
        write(tmp_path, {"train.jsonl": "\n".join(map(json.dumps, wrong))})
        message = rf"{tmp_path}/train.jsonl, row {row} .* column 'text' has {re.escape(repr(value))}.*remove the row"
        with pytest.raises(ValueError, match=message):
            load(DataConfig(dataset=str(tmp_path), max_length=8))
    with pytest.raises(ValueError, match=r"row 0 .* column 'number' has 0.*--data.text_columns"):
        load(DataConfig(dataset=str(tmp_path / "train.jsonl"), text_columns=("number",), max_length=8))


@pytest.mark.parametrize("task_type", ["classification", "causal-lm", "masked-lm", "embedding"])
def test_numbers_in_a_text_column_of_a_csv_file_are_text(task_type, tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    numbers = [f"{row}.50" for row in range(80)]
    table = "\n".join(["text,label", *(f"{number},{row % 2}" for row, number in enumerate(numbers))])
    data = DataConfig(dataset=str(write(tmp_path, {"rows.csv": table}) / "rows.csv"), max_length=8)
    splits = load_splits(data, ("text",)).splits
    assert sorted((*splits["train"]["text"], *splits["validation"]["text"])) == sorted(numbers)
    assert load_task_data(task_type, tokenizer(), data, 0).longest > 2


@pytest.mark.parametrize("task_type", ["causal-lm", "masked-lm", "embedding"])
def test_a_text_gives_the_same_rows_wherever_it_comes_from(task_type, tmp_path):
    """From a file of lines, a table, a saved data set and memory."""
    texts = sample_text(60).splitlines()
    table = "\n".join(json.dumps({"text": text}) for text in texts)
    write(tmp_path, {"text.txt": "\n".join(texts), "table.jsonl": table})
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    sources: list[dict[str, Any]] = [{"dataset": str(tmp_path / name)} for name in ("text.txt", "table.jsonl", "saved")]
    loaded = [
        load_task_data(task_type, tokenizer(), DataConfig(**source, documents="lines", max_length=12), seed=0)
        for source in sources
    ]
    loaded.append(load_task_data(task_type, tokenizer(), DataConfig(max_length=12), seed=0, documents=texts))
    assert [data.name for data in loaded] == ["text.txt", "table.jsonl", "saved", "the given documents"]
    assert len({data.checksum() for data in loaded}) == 1
    held_out = sorted(random.Random(0).sample(range(len(texts)), round(0.1 * len(texts))))
    expected = Counter(tokenizer()(" ".join(texts[index] for index in held_out), add_special_tokens=False)["input_ids"])
    rows = loaded[0].held_out[""]["input_ids"][:]
    tokens = Counter(token for row in rows for token in row if token not in tokenizer().all_special_ids)
    assert tokens <= expected
    assert tokens.total() > 0.7 * expected.total()  # what fills no row is left out


def test_documentation_of_python_is_a_text():
    data = load_task_data("embedding", tokenizer(), DataConfig(dataset="python-documentation", max_length=64), seed=0)
    assert data.name.startswith("docstrings of the standard library")
    assert len(data.train) > 1000


def test_few_documents_are_one_running_text():
    """Its end is held out, which cuts a document into two."""
    lines = sample_text(60).splitlines()
    for count, expected in ((9, "running text, "), (12, "12 documents, ")):
        documents = [" ".join(lines[first::count]) for first in range(count)]
        data = load_task_data("embedding", tokenizer(), DataConfig(max_length=12), seed=0, documents=documents)
        assert data.row_summary.startswith(expected)


def test_documents_are_data_of_their_own():
    with pytest.raises(ValueError, match="two kinds of data: documents, and 'rte'"):
        load_task_data("embedding", tokenizer(), DataConfig(task="rte", max_length=8), 0, documents=["alpha"])
    with pytest.raises(ValueError, match="Documents have no labels"):
        load_task_data("classification", tokenizer(), DataConfig(max_length=8), 0, documents=["alpha"])


def test_all_validation_splits_are_held_out(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra 'train'")
    parts = {"train": ["abc"], "validation_b": ["def"], "validation_a": ["ghi", "jkl"]}
    saved = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(saved).save_to_disk(tmp_path)
    loaded = load_splits(DataConfig(dataset=str(tmp_path)), ("text",)).splits
    assert {name: split["text"][:] for name, split in loaded.items()} == parts


@pytest.mark.parametrize("columns", [(), ("text", "second")])
@pytest.mark.parametrize("task_type", ["causal-lm", "masked-lm", "embedding"])
def test_documents_are_one_column(task_type, columns, tmp_path):
    data = DataConfig(dataset=str(tmp_path / "not read"), text_columns=columns, max_length=8)
    with pytest.raises(OptionError, match=f"data.text_columns: .* not {', '.join(columns) or 'none'}"):
        load_task_data(task_type, tokenizer(), data, seed=0)


def test_text_columns_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "book.txt").write_text(sample_text(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"The data set has no column 'story'"):
        load_splits(DataConfig(dataset=str(tmp_path / "book.txt"), text_columns=("story",)), ("story",))
    for columns in ((), ("a", "b", "c")):
        with pytest.raises(OptionError, match=r"data.text_columns: must be one column, or two for pairs, not"):
            load_labelled(DataConfig(dataset="not read", text_columns=columns))


@pytest.mark.parametrize("option", [{"text_columns": ("sentence",)}, {"label_column": "score"}])
def test_columns_of_a_task_cannot_be_renamed(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is for your own data: 'sst2' has its columns"):
        load_labelled(DataConfig(task="sst2", **option))


def test_classes_that_differ_from_split_to_split(tmp_path):
    def split(*names):
        return Dataset.from_dict({"text": ["x"] * len(names), "label": names}).class_encode_column("label")

    DatasetDict(train=split("a", "b", "c"), validation=split("b", "c")).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"classes of the split 'validation' have other names.*\(a, b, c\)"):
        load_labelled(DataConfig(dataset=str(tmp_path / "data")))


def test_a_score_that_is_no_number_names_the_row(tmp_path):
    rows = [{"text": "x", "label": number / 10} for number in range(9)] + [{"text": "x", "label": math.nan}]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    data = DataConfig(dataset=str(tmp_path / "rows.parquet"), validation_size=0.5, max_length=8)
    with pytest.raises(ValueError, match=r"row 9 \(the first is 0\): the column 'label' has nan, which is no"):
        load_task_data("classification", tokenizer(), data, 0)


def test_whole_numbers_are_scores_where_the_training_rows_have_scores(tmp_path):
    train = [{"text": "x", "label": number / 10} for number in range(9)]
    held_out = [{"text": "x", "label": number} for number in (-1, -1, 5)]
    parts = {"train.jsonl": train, "validation.jsonl": held_out}
    folder = write(tmp_path, {name: "\n".join(map(json.dumps, rows)) for name, rows in parts.items()})
    config = DataConfig(dataset=str(folder), metrics=("mse",), max_length=8)
    data = load_task_data("classification", tokenizer(), config, 0)
    assert data.held_out[""]["labels"][:] == [-1.0, -1.0, 5.0]


def test_validation_rows_of_a_text_are_drawn_from_all_of_it(tmp_path):
    dataset = str(write(tmp_path, {"text.txt": sample_text(60)}) / "text.txt")
    data = DataConfig(dataset=dataset, documents="lines", validation_size=0.5, max_length=32)
    every = load_task_data("embedding", tokenizer(), data, 0).held_out[""]
    few = load_task_data("embedding", tokenizer(), replace(data, max_eval_samples=4), 0).held_out[""]
    held_out = [tuple(row) for row in every["input_ids"]]
    assert len(few) == 4
    assert {tuple(row) for row in few["input_ids"]} <= set(held_out)
    again = load_task_data("embedding", tokenizer(), replace(data, max_eval_samples=4), 7).held_out[""]
    assert few["input_ids"][:] == again["input_ids"][:]


def test_names_of_classes_in_a_parquet_file(tmp_path):
    names = ["spam", "ham"]
    rows = Dataset.from_dict({"text": [f"text {i}" for i in range(20)], "label": [0, 1] * 10})
    rows.cast_column("label", ClassLabel(names=names)).to_parquet(tmp_path / "train.parquet")
    source, _, labels, _ = load_labelled(DataConfig(dataset=str(tmp_path)))
    assert labels.names == ("spam", "ham")
    assert source.splits["train"].features["label"].names == names
    file = parquet.read_table(tmp_path / "train.parquet")
    other = file.set_column(1, file.schema.field("label"), pa.array([0, 2] * 10))
    parquet.write_table(other, tmp_path / "train.parquet")  # its metadata still name two classes
    with pytest.raises(ValueError, match=r"column 'label' has 2, which is no label: classes are 0 and up: spam, ham"):
        load_labelled(DataConfig(dataset=str(tmp_path)))


def test_splits_that_nothing_is_done_with_may_lack_labels(tmp_path):
    rows = "text,label\n" + "\n".join(f"t{number},{number % 2}" for number in range(20))
    folder = write(tmp_path, {"data/train.csv": rows, "data/test.csv": "text,label\nx,-1\n"})
    assert set(load_labelled(DataConfig(dataset=str(folder / "data")))[0].splits) == {"train"}


def test_the_first_of_several_validation_splits_decides(tmp_path):
    texts = sample_text(60).splitlines()
    parts = {"train": texts[:40], "validation_a": texts[40:50], "validation_b": texts[50:]}
    splits = {name: Dataset.from_dict({"text": part}) for name, part in parts.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "data")
    data = DataConfig(dataset=str(tmp_path / "data"), max_length=16)
    assert load_task_data("causal-lm", tokenizer(), data, 0).best_step_metric == "a_loss"


def test_rows_are_as_long_as_what_the_encoder_or_the_decoder_reads(tmp_path):
    texts = [("alpha beta gamma one two", "red"), ("red", "alpha beta gamma one two"), ("red", "blue")] * 4
    rows = "\n".join(json.dumps({"text": text, "target": target}) for text, target in texts)
    path = str(write(tmp_path, {"rows.jsonl": rows}) / "rows.jsonl")
    data = DataConfig(dataset=path, text_columns=("text", "target"), max_length=16, validation_size=0.25)
    pairs = load_task_data("seq2seq-lm", tokenizer(), data, 0)
    long = pairs.longer_than(pairs.train, 5)
    assert {len(row["input_ids"]) > 5 for row in long} == {True, False}
    assert all(max(len(row["input_ids"]), len(row["labels"])) > 5 for row in long)
    assert pairs.inputs(pairs.train).column_names == pairs.train.column_names
    passages = load_task_data("embedding", tokenizer(), replace(data, text_columns=("text",)), 0)
    labelled = passages.train.add_column("labels", [[0.0] * 9] * len(passages.train))
    assert {len(row["input_ids"]) > 5 for row in passages.longer_than(labelled, 5)} == {True}
    assert "labels" not in passages.inputs(labelled).column_names
