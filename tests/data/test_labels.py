"""Labels: their kinds, their order, and which output of a head they are; errors name source, row and column."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from typing import Any

import pandas
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Sequence
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import BertConfig

from hf_linear_attn.data.files import Source
from hf_linear_attn.data.labels import Head, encode_labels

ORDER = {0: "pos", 1: "neg", 2: "so-so"}


def encoded(labels: list[Any], head: Any = None, validation: list[Any] | None = None, feature: Any = None) -> Any:
    """The labels of the training rows, and what they are."""
    splits = DatasetDict(train=Dataset.from_dict({"text": ["x"] * len(labels), "label": labels}))
    if validation is not None:
        splits["validation"] = Dataset.from_dict({"text": ["x"] * len(validation), "label": validation})
    if feature is not None:
        splits = splits.cast_column("label", feature)
    columns, result = encode_labels(Source(splits, name="'here'"), ["label"], None if head is None else Head.of(head))
    assert columns.column_names["train"] == ["text", "label"]
    return columns["train"]["label"][:], result


def head(names: dict[int, str] | int, problem: str | None = None) -> BertConfig:
    named = {"num_labels": names} if isinstance(names, int) else {"id2label": names}
    return BertConfig(**named, problem_type=problem)


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["so", "no", "so"], ("no", "so"), [1, 0, 1]),
        ([10, 9, 10], ("9", "10"), [1, 0, 1]),
        (["10", "9", "9"], ("9", "10"), [1, 0, 0]),
        ([True, False, True], ("false", "true"), [1, 0, 1]),
        ([Decimal(3), Decimal(1), Decimal(3)], ("1", "3"), [1, 0, 1]),  # of a column without digits after the point
    ],
)
def test_classes(labels, names, expected):
    numbers, result = encoded(labels)
    assert (result.problem, result.names, numbers) == ("single_label_classification", names, expected)


@pytest.mark.parametrize(
    "labels", [["1.5", "2", "-.5e1"], [1.5, 2.0, -5.0], [Decimal("1.50"), Decimal("2.00"), Decimal("-5.00")]]
)
def test_scores(labels):
    numbers, result = encoded(labels)
    assert (result.problem, result.names, numbers) == ("regression", None, [1.5, 2.0, -5.0])


def test_lists_of_classes():
    rows = [["b", "a"], [], ["c"], ["a"]]
    numbers, result = encoded(rows)
    binarizer = MultiLabelBinarizer()
    assert numbers == binarizer.fit_transform(rows).tolist()
    assert (result.problem, result.names) == ("multi_label_classification", tuple(binarizer.classes_))


def test_lists_of_zeros_and_ones_are_refused_where_they_are_no_lists_of_classes():
    with pytest.raises(ValueError, match=r"has \[0, 1, 0\], with a label twice: list those of the row, or"):
        encoded([[0, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match=r"has \[1.0, 0.0\], of which some are no classes"):
        encoded([[1.0, 0.0], [0.0, 1.0]])


def test_a_column_for_each_label():
    table = pandas.DataFrame({"text": ["x", "y", "z"], "toxic": [0, 1, 1], "threat": ["0", "1", "0"]})
    splits = DatasetDict(train=Dataset.from_pandas(table))
    columns, result = encode_labels(Source(splits), ["toxic", "threat"])
    assert columns["train"]["label"][:] == table[["toxic", "threat"]].astype(float).values.tolist()
    assert (result.problem, result.names) == ("multi_label_classification", ("toxic", "threat"))
    other = head({0: "threat", 1: "insult", 2: "toxic"}, "multi_label_classification")
    columns, result = encode_labels(Source(splits), ["toxic", "threat"], Head.of(other))
    assert columns["train"]["label"][:] == [[0, 0, 0], [1, 0, 1], [0, 0, 1]]
    splits["train"] = splits["train"].add_column("insult", [0, 1, 3])
    with pytest.raises(
        ValueError, match=r"split 'train' of the data set, row 2 .* column 'insult' has 3, where 0 or 1 says whether"
    ):
        encode_labels(Source(splits), ["toxic", "insult"])


@pytest.mark.parametrize("labels", [["neg", "pos", "so-so", "pos"], ["NEG", "Pos", "SO-SO", "pOs"], [1, 0, 2, 0]])
def test_classes_are_matched_with_the_names_of_a_head_or_with_the_numbers_of_its_outputs(labels):
    numbers, result = encoded(labels, head(ORDER))
    assert (numbers, result.names) == ([1, 0, 2, 0], ("pos", "neg", "so-so"))


def test_what_is_assumed_of_a_head_is_told():
    assert encoded(["neg", "pos"], head(ORDER))[1].notes == ()
    (note,) = encoded([2, 0, 2], head(ORDER))[1].notes
    assert note == "The labels are taken as the numbers of the model's outputs: 0 is pos, 2 is so-so."
    numbers, result = encoded(["yes", "no"], head(2))  # it calls its outputs LABEL_0 and LABEL_1
    assert (numbers, result.names) == ([1, 0], ("no", "yes"))
    assert result.notes[0].endswith("taken to be those of the labels in order: 0 is no, 1 is yes.")
    assert encoded([2, 0], head(3))[:1] == ([2, 0],)
    assert encoded([1, 2, 1], head(2))[0] == [0, 1, 0]  # there is no output 2


def test_a_class_label_is_matched_by_its_names():
    numbers, result = encoded([0, 1, 1], head(ORDER), feature=ClassLabel(names=["neg", "pos"]))
    assert (numbers, result.names, result.outputs) == ([1, 0, 0], ("pos", "neg", "so-so"), (1, 0))
    several = Sequence(ClassLabel(names=["neg", "pos"]))
    assert encoded([[0], [0, 1]], head(ORDER, "multi_label_classification"), feature=several)[0] == [
        [0, 1, 0],
        [1, 1, 0],
    ]


def test_a_head_says_how_numbers_are_meant():
    assert encoded([3, 1, 2], head(1))[1].problem == "regression"
    assert encoded(["pos", "neg"], head(ORDER, "multi_label_classification"))[0] == [[1, 0, 0], [0, 1, 0]]
    assert encoded([2, 0], head(ORDER), validation=[1])[0] == [2, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "", "b"], "'here', row 1 (the first is 0): the column 'label' has '', which is no label"),
        (["a", None], "'here', row 1 (the first is 0): the column 'label' has None, which is no label"),
        ([0.5, float("nan")], "row 1 (the first is 0): the column 'label' has nan, which is no label"),
        (["2", "3.5", "NA"], "row 2 (the first is 0): the column 'label' has 'NA', and row 1 the number 3.5"),
        ([datetime.date(2020, 1, 1)], "column 'label' has datetime.date(2020, 1, 1), which is no label"),
        ([[0.5], [1.0]], "row 0 (the first is 0): the column 'label' has [0.5], of which some are no classes"),
    ],
)
def test_what_is_no_label_is_named(labels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(labels)


def test_labels_of_several_kinds_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "x", "label": 1}\n{"text": "x", "label": "b"}\n')
    rows = Dataset.from_json(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ValueError, match=r"row 1 .* has 'b', which is text, and the rows before have a"):
        encode_labels(Source(DatasetDict(train=rows)), ["label"])
    with pytest.raises(
        ValueError, match=r"split 'validation' of 'here', row 0 .* has 1, which is a number, and the training"
    ):
        encoded(["a"], validation=[1])


@pytest.mark.parametrize("labels", [["a"] * 3, [1.5] * 3, [["a", "b"]] * 3])
def test_labels_that_are_all_the_same_are_refused(labels):
    with pytest.raises(ValueError, match=r"All 3 training rows have the label .*: there is nothing to learn"):
        encoded(labels)


def test_a_class_that_only_held_out_rows_have_is_an_error():
    with pytest.raises(
        ValueError, match=r"split 'validation' of 'here', row 1 .* 'c', which does not occur in .* data \(a, b\)"
    ):
        encoded(["a", "b"], validation=["a", "c"])


@pytest.mark.parametrize(
    ("labels", "config", "message"),
    [
        (["good", "bad", "bad"], head(ORDER), "labels pos, neg, so-so; the data has bad, good"),
        (["a", "b"], head(3), "labels LABEL_0, LABEL_1, LABEL_2; the data has a, b"),
        ([1, 3], head(ORDER), "the data has 1, 3"),
        ([0.5, 1.5], head(ORDER), r"trained with classes \(pos, neg, so-so\); the data has scores"),
        ([["a"], ["b"]], head(ORDER), "trained with classes .* the data has several labels a row"),
        (["a", "b"], head(1), "trained with scores .* the data has classes"),
        ([0.5, 1.5], head(ORDER, "multi_label_classification"), "several labels a row .* the data has scores"),
    ],
)
def test_labels_that_are_not_those_of_a_head_are_refused(labels, config, message):
    with pytest.raises(ValueError, match=message):
        encoded(labels, config)
