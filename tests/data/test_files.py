"""Sources of text: every format and folder layout, and what is wrong with one."""

from __future__ import annotations

import csv
import gzip
import random
import re
from pathlib import Path

import datasets
import pandas
import pytest

from hf_linear_attn.data.files import (
    Quoting,
    check_columns,
    load_source,
    quotes_delimit,
    split_articles,
)
from hf_linear_attn.data.task_data import hold_out
from tests.data.tiny_data import SHARED, write

ROWS = {"text": ['one, "two"', "three\nfour"], "label": [0, 1]}
WIKI = (
    " \n = First = \n \n A text . \n = = Part = = \n \n More . \n \n = Second ( 2 ) = \n \n = 3 , Played = \n End . \n"
)

#: What files hold that are no text, with the rows that they mean. Cells of csv and tsv files are text, as they stand.
TABLES = {
    "csv": (
        '\ufefftext,label\r\n"one, ""two""",0\r\n"three\nfour",0012\r\nNone,\r\n',
        {"text": ['one, "two"', "three\nfour", "None"], "label": ["0", "0012", ""]},
    ),
    "tsv": ('text\tlabel\none, "two"\tNA\nthree\t1.50\n', {"text": ['one, "two"', "three"], "label": ["NA", "1.50"]}),
    "json": ('[{"text": "one, \\"two\\"", "label": 0},\n {"label": 1, "text": "three\\nfour"}]', ROWS),
    "jsonl": ('{"text": "one, \\"two\\"", "label": 0}\n{"label": 1, "text": "three\\nfour"}\n', ROWS),
}

#: Text files, with their documents.
TEXTS = {
    "txt": ("\ufeffone\r\ntwo\n\u2028three\n", ["one\ntwo\n\u2028three"]),
    "text": ("one\n\nstill one\n", ["one\n\nstill one"]),
    "smi": ("CCO\nC#N\n", ["CCO", "C#N"]),
    "tokens": ("one <|endoftext|> two", ["one", "two"]),
    "md": ("# one\ntwo\n", ["# one\ntwo"]),
    "": ("one\ntwo\n", ["one\ntwo"]),
}


def content(split):
    return split.to_dict()


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize("suffix", sorted(TABLES))
def test_tables(suffix, packed, tmp_path):
    text, expected = TABLES[suffix]
    path = write(tmp_path, {f"some.{suffix}{packed}": text}) / f"some.{suffix}{packed}"
    loaded = load_source(str(path)).splits
    assert list(loaded) == ["train"]
    assert content(loaded["train"]) == expected


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", sorted(TEXTS))
def test_texts(suffix, packed, tmp_path):
    text, expected = TEXTS[suffix]
    name = f"some.{suffix}".rstrip(".") + packed
    path = write(tmp_path, {name: text}) / name
    assert load_source(str(path)).splits["train"]["text"][:] == expected
    lines = [line.strip("\ufeff").strip() for line in text.split("\n") if line.strip()]
    assert load_source(str(path), split_by="lines").splits["train"]["text"][:] == lines


def test_a_parquet_file_and_a_name_with_brackets(tmp_path):
    for name in ("some.parquet", "some[1]*.parquet"):
        datasets.Dataset.from_dict(ROWS).to_parquet(tmp_path / name)
        assert content(load_source(str(tmp_path / name)).splits["train"]) == ROWS


def test_a_folder_of_splits(tmp_path):
    """Each file has its own columns; those that are not trained or measured on are not read."""
    write(tmp_path, {"train.csv": "text,n\na,1\n", "dev.tsv.gz": "n\tmore\ttext\n1.5\tx\tb\n", "test.csv": "id,tex\n"})
    write(tmp_path, {"README.md": "not read", "unsup.csv": "other\n"})
    loaded = load_source(str(tmp_path)).splits
    assert {split: content(part) for split, part in loaded.items()} == {
        "train": {"text": ["a"], "n": ["1"]},
        "validation": {"n": ["1.5"], "more": ["x"], "text": ["b"]},
    }


#: Rows as pandas and spreadsheets quote them in a tsv file, what they mean, and texts that have quotation marks.
QUOTED = [
    (csv.QUOTE_MINIMAL, [["text", "label"], ['He said "so"', "1"], ["plain", "0"]]),
    (csv.QUOTE_MINIMAL, [["text", "label"], ["one\ttwo", "1"], ["three\nfour", "0"]]),
    (csv.QUOTE_ALL, [["text", "label"], ["plain", "1"], ["", "0"]]),
]


@pytest.mark.parametrize(("quoting", "rows"), QUOTED)
def test_a_tsv_file_with_fields_in_quotation_marks_is_found_out(quoting, rows, tmp_path):
    with (tmp_path / "rows.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows(rows)
    source = load_source(str(tmp_path / "rows.tsv"))
    assert [list(row.values()) for row in source.splits["train"]] == rows[1:]
    assert source.notes == ("rows.tsv: quotation marks delimit fields; --data.quoting says otherwise.",)


@pytest.mark.parametrize("text", ['"Yes."', '"Yes," he said', 'a "quote"', '"', '""', '"one" and "two"'])
def test_quotation_marks_that_are_text_stay(text, tmp_path):
    path = write(tmp_path, {"rows.tsv": f"text\tlabel\n{text}\t1\nother\t0\n"}) / "rows.tsv"
    source = load_source(str(path))
    assert source.splits["train"]["text"][:] == [text, "other"]
    assert source.notes == ("rows.tsv: quotation marks are a part of the text; --data.quoting says otherwise.",)


def test_an_option_decides_on_quotation_marks(tmp_path):
    text = 'text\tlabel\n"He said ""so"""\t1\n"Yes."\t0\n'
    path = str(write(tmp_path, {"rows.tsv": text}) / "rows.tsv")
    expected: dict[Quoting, list[str]] = {
        "none": ['"He said ""so"""', '"Yes."'],
        "minimal": ['He said "so"', "Yes."],
        "auto": ['He said "so"', "Yes."],
    }
    for quoting, texts in expected.items():
        assert load_source(path, quoting=quoting).splits["train"]["text"][:] == texts
    table = str(write(tmp_path, {"rows.csv": 'text,label\n"Yes" he said,1\n'}) / "rows.csv")
    assert load_source(table, quoting="none").splits["train"]["text"][:] == ['"Yes" he said']


def test_what_a_spreadsheet_cannot_have_written_is_text():
    assert quotes_delimit('a\tb\n"x ""y"""\t1\n')
    assert not quotes_delimit('a\tb\n"x ""y"""\t1\nso "it is\t0\n')  # a mark that delimits nothing
    assert not quotes_delimit('a\tb\n"x ""y""\t1"\n')  # a row with one cell too few


def test_a_blank_line_an_optional_key_and_the_index_of_pandas_are_no_errors(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a"}\n{"text": "b", "note": "x"}\n\n{"text": "c"}\n\n'})
    source = load_source(str(tmp_path / "a.jsonl"))
    assert source.splits["train"]["text"][:] == ["a", "b", "c"]
    assert source.notes == ("a.jsonl: 2 blank lines are left out.",)
    pandas.DataFrame(ROWS).to_csv(tmp_path / "b.csv")
    source = load_source(str(tmp_path / "b.csv"))
    assert source.splits["train"]["text"][:] == ROWS["text"]
    assert source.splits["train"]["label"][:] == ["0", "1"]


def test_saved_data_sets(tmp_path):
    one = datasets.Dataset.from_dict(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "valid": one}).save_to_disk(tmp_path / "two")
    assert list(load_source(str(tmp_path / "one")).splits) == ["train"]
    assert content(load_source(str(tmp_path / "two")).splits["validation"]) == ROWS
    (tmp_path / "one" / "dataset_info.json").unlink()
    with pytest.raises(OSError, match="no complete saved data set"):
        load_source(str(tmp_path / "one"))


def test_wikitext(tmp_path):
    first, second = split_articles(WIKI)
    assert first == " = First = \n \n A text . \n = = Part = = \n \n More . \n "
    assert second == " = Second ( 2 ) = \n \n = 3 , Played = \n End . \n"
    assert split_articles("Preface \n" + WIKI)[0] == "Preface \n "
    write(tmp_path, {f"wiki.{split}.tokens": WIKI for split in ("train", "valid", "test")})
    loaded = load_source(str(tmp_path)).splits
    assert loaded.num_rows == {"train": 2, "validation": 2}
    assert sum(len(text.split()) for text in loaded["train"]["text"]) == len(WIKI.split())


BAD_FILES = [
    ("a.csv", "", "a.csv' cannot be read (No columns"),
    ("a.csv", "text,label\n", "a.csv' has no rows"),
    (
        "a.csv",
        "text,label\na,1\nb,2,3\n",
        "a.csv' cannot be read (Error tokenizing data. C error: Expected 2 f",
    ),
    ("a.csv", "text,label\na,1,2\nb,2,3\n", "a.csv' cannot be read (Length of header or names does not match"),
    ("a.csv", 'text,label\n"a,1\n', "EOF inside string starting at row 1). Correct the file"),
    ("a.json", "[\n{]", "a.json' cannot be read"),
    ("a.json", "[]", "a.json' has no rows"),
    ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl' cannot be read (JSON parse error: Invalid value. in row 1)"),
    ("a.txt", " \n", "a.txt' has no rows"),
    ("a.jsonk", "{}", "format of .*a.jsonk' is unknown. Did you mean 'json"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_bad_files_are_errors(name, text, message, tmp_path):
    write(tmp_path, {name: text})
    with pytest.raises(ValueError, match=message if ".*" in message else re.escape(message)):
        load_source(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_bytes_that_are_no_text_are_errors(name, tmp_path):
    (tmp_path / name).write_bytes(b"text\tlabel\nfine\t1\n\xff\t1\n")
    with pytest.raises(ValueError, match=rf"{name}' cannot be read .*Convert it to UTF-8"):
        load_source(str(tmp_path / name))


def test_unreadable_files_are_errors(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR")
    with pytest.raises(ValueError, match=r"a.parquet' cannot be read"):
        load_source(str(tmp_path / "a.parquet"))
    for name in ("a.txt.gz", "a.csv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"text,label\n" * 1000)[:40])
        with pytest.raises(ValueError, match=rf"{name}' cannot be read .*fetch it again"):
            load_source(str(tmp_path / name))


def test_bad_folders_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no files named by split .* found nothing"):
        load_source(str(tmp_path))
    write(tmp_path, {"train.csv": "a\n1\n", "train.jsonl": '{"a": 1}\n'})
    with pytest.raises(ValueError, match=r"two files for train: train.csv, train.jsonl"):
        load_source(str(tmp_path))


@pytest.mark.parametrize("source", ["./none", "/none/data", "none.csv", "a/b/c", "~/none.jsonl.xz"])
def test_missing_files_are_errors(source):
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        load_source(source)


def test_hub_sets(monkeypatch, tmp_path):
    with pytest.raises(OSError, match=r"Hub data set 'someone/some', config 'c'.*give a local file or folder"):
        load_source("someone/some", config="c")
    part = datasets.Dataset.from_dict(ROWS)
    both = datasets.DatasetDict({"train": part, "dev": part, "validation": part})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: both)
    with pytest.raises(ValueError, match="several validation splits: train, dev, validation"):
        load_source("someone/some")
    write(tmp_path, {"a.txt": "one"})
    with pytest.raises(ValueError, match="'c' applies to data sets of the Hub only"):
        load_source(str(tmp_path / "a.txt"), config="c")


def test_empty_splits_are_errors(monkeypatch, tmp_path):
    none = datasets.Dataset.from_dict({"text": []})
    none.save_to_disk(tmp_path / "none")
    with pytest.raises(OSError, match="is empty or no complete saved data set"):
        load_source(str(tmp_path / "none"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: datasets.DatasetDict({"train": none}))
    with pytest.raises(ValueError, match="has no rows in train"):
        load_source("someone/some")


@pytest.mark.parametrize(("size", "count"), [(0.1, 10), (0.07, 7), (0.0001, 2)])
def test_carved_validation(size, count):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"n": list(range(100))})})
    loaded, again = (hold_out(splits, size) for _ in range(2))
    validation, rest = loaded["validation"]["n"][:], loaded["train"]["n"][:]
    assert len(validation) == count
    assert sorted(validation + rest) == list(range(100))
    assert validation == sorted(validation)
    assert rest == sorted(rest)
    assert again["validation"]["n"][:] == validation
    assert validation == sorted(random.Random(0).sample(range(100), count))


def test_validation_that_cannot_be_carved():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"n": [1], "m": [2]})})
    with pytest.raises(ValueError, match=r"2 of 1 rows cannot be held out for validation\. Give more"):
        hold_out(splits, 0.1)


def test_columns_are_checked():
    part = datasets.Dataset.from_dict(ROWS)
    splits = datasets.DatasetDict({"train": part})
    check_columns(splits, ["text", "label"])
    with pytest.raises(ValueError, match=r"no column 'txt'. Did you mean 'text'\? Columns: text, label"):
        check_columns(splits, ["txt", "label"])
    with pytest.raises(ValueError, match=r"no column 'labels'.*'label'.*--data.text_columns and --data.label_column"):
        check_columns(splits, ["text", "labels"])
    with pytest.raises(ValueError, match=r"no column 'labels'.*Without labels, give --task_type: causal-lm"):
        check_columns(splits, ["text", "labels"], ["labels"])
    with pytest.raises(ValueError, match=r"no column 'txt'.*label_column\.$"):
        check_columns(splits, ["txt", "label"], ["label"])


def real(name: str) -> str:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the data set {name} is not at hand")
    return str(path)


@pytest.mark.real
def test_real_wikitext():
    loaded = load_source(real("lm/wikitext-2")).splits
    assert loaded.num_rows == {"train": 600, "validation": 60}
    vocabulary = {split: sum(len(text.split()) for text in part["text"]) for split, part in loaded.items()}
    assert vocabulary == {"train": 2_051_910, "validation": 213_886}


@pytest.mark.real
def test_real_proteins():
    loaded = load_source(real("protein/deeploc2_swissprot.csv.xz")).splits["train"]
    assert len(loaded) == 28303
    assert len(set(loaded["accession"])) == 28303
    assert set(loaded["partition"]) == set("01234")


@pytest.mark.real
@pytest.mark.parametrize("name", ["MNLI/train_subset.tsv", "QQP/train_subset.tsv", "RTE/train.tsv"])
def test_every_row_and_every_text_of_real_files_is_kept(name):
    """As a reader by hand has them, split at tabs; the defaults of `datasets` lose rows and alter texts."""
    lines = Path(real(f"glue/{name}")).read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    rows = [line.removesuffix("\r").split("\t") for line in lines]
    loaded = load_source(real(f"glue/{name}"), quoting="none").splits["train"]
    assert [list(row.values()) for row in loaded] == rows[1:]
