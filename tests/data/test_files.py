"""Sources of text: every format and folder layout, and what is wrong with one."""

from __future__ import annotations

import gzip
import lzma
import re

import datasets
import pytest

from hf_linear_attn.data.files import (
    FORMATS,
    TEXT_FORMATS,
    check_columns,
    hold_out_validation,
    load_source,
    split_articles,
)
from hf_linear_attn.data.text import hold_out
from tests.data.tiny_data import SHARED, write

ROWS = {"text": ['one, "two"', "three\nfour"], "label": [0, 1]}
WIKI = (
    " \n = First = \n \n A text . \n = = Part = = \n \n More . \n \n = Second ( 2 ) = \n \n = 3 , Played = \n End . \n"
)

FILES = {
    "csv": '\ufefftext,label\r\n"one, ""two""",0\r\n"three\nfour",1\r\n',
    "json": '[{"text": "one, \\"two\\"", "label": 0},\n {"label": 1, "text": "three\\nfour"}]',
    "jsonl": '{"text": "one, \\"two\\"", "label": 0}\n{"label": 1, "text": "three\\nfour"}\n',
    "tsv": 'text\tlabel\none, "two"\t0\nthree\t1\n',
    "txt": "one\ntwo\n\u2028three\n",
    "text": "one\n\nstill one\n",
    "smi": "CCO\nC#N\n",
    "tokens": "one <|endoftext|> two",
    "raw": "one\ntwo\n",
    "fasta": ">sp|A\nMAS\nVSI\n\n>sp|B\nM\n",
    "fa": ">A\nM\n",
}
EXPECTED = {
    **dict.fromkeys(("csv", "json", "jsonl", "parquet"), ROWS),
    "tsv": {"text": ['one, "two"', "three"], "label": [0, 1]},
    "txt": {"text": ["one\ntwo\n\u2028three"]},
    "text": {"text": ["one\n\nstill one"]},
    "smi": {"text": ["CCO", "C#N"]},
    "tokens": {"text": ["one", "two"]},
    "raw": {"text": ["one\ntwo"]},
    "fasta": {"description": ["sp|A", "sp|B"], "sequence": ["MASVSI", "M"]},
    "fa": {"description": ["A"], "sequence": ["M"]},
}


def content(split):
    return split.to_dict()


@pytest.mark.parametrize("packed", ["", ".xz", ".gz"])
@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_formats(suffix, packed, tmp_path):
    path = tmp_path / f"some.{suffix}{packed}"
    if suffix == "parquet":
        parquet = tmp_path / "some.parquet"
        datasets.Dataset.from_dict(ROWS).to_parquet(parquet)
        path.write_bytes({"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[packed](parquet.read_bytes()))
    else:
        write(tmp_path, {path.name: FILES[suffix]})
    loaded = load_source(str(path))
    assert list(loaded) == ["train"]
    assert content(loaded["train"]) == EXPECTED[suffix]
    if suffix in TEXT_FORMATS:
        lines = [line.strip() for line in FILES[suffix].split("\n") if line.strip()]
        assert load_source(str(path), documents="lines")["train"]["text"][:] == lines


def test_a_folder_of_splits(tmp_path):
    write(tmp_path, {"train.csv": "text,n\na,1\n", "dev.csv.gz": "text,n\nb,1.5\n", "test.csv": "text,n\nc,\n"})
    write(tmp_path, {"README.md": "not read", "unsup.csv": "other\n"})
    loaded = load_source(str(tmp_path))
    assert {split: content(part) for split, part in loaded.items()} == {
        "train": {"text": ["a"], "n": [1.0]},
        "validation": {"text": ["b"], "n": [1.5]},
        "test": {"text": ["c"], "n": [None]},
    }


def test_codes_stay_text(tmp_path):
    write(tmp_path, {"some.csv": "code,year,share,empty\n0012,1999,.5,\n0013,2000,1e-3,\n"})
    loaded = content(load_source(str(tmp_path / "some.csv"))["train"])
    assert loaded == {"code": ["0012", "0013"], "year": [1999, 2000], "share": [0.5, 0.001], "empty": ["", ""]}


def test_saved_data_sets(tmp_path):
    one = datasets.Dataset.from_dict(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "valid": one}).save_to_disk(tmp_path / "two")
    assert list(load_source(str(tmp_path / "one"))) == ["train"]
    assert content(load_source(str(tmp_path / "two"))["validation"]) == ROWS
    (tmp_path / "one" / "dataset_info.json").unlink()
    with pytest.raises(OSError, match="no complete saved data set"):
        load_source(str(tmp_path / "one"))


def test_wikitext(tmp_path):
    first, second = split_articles(WIKI)
    assert first == " = First = \n \n A text . \n = = Part = = \n \n More . \n "
    assert second == " = Second ( 2 ) = \n \n = 3 , Played = \n End . \n"
    assert split_articles("Preface \n" + WIKI)[0] == "Preface \n "
    write(tmp_path, {f"wiki.{split}.tokens": WIKI for split in ("train", "valid", "test")})
    loaded = load_source(str(tmp_path))
    assert loaded.num_rows == {"train": 2, "validation": 2, "test": 2}
    assert sum(len(text.split()) for text in loaded["train"]["text"]) == len(WIKI.split())


BAD_FILES = [
    ("a.csv", "", "a.csv' is empty"),
    ("a.csv", "text,label\n", "a.csv' has no rows"),
    ("a.csv", "text,label\na,1\nb\n", "a.csv, line 3: 1 columns, expected 2; found ['b']"),
    ("a.csv", 'text,label\n"a,1\n', "a.csv, line 2: unexpected end of data"),
    ("a.csv", "text,text\na,1\n", "a.csv, line 1: the header has empty or repeated names: 'text'"),
    ("a.tsv", "text\tlabel\na\n", "a.tsv, line 2: 1 columns, expected 2"),
    ("a.json", "[1]", "a.json, entry 1: expected a JSON object, found 1"),
    ("a.json", "[\n{]", "a.json, line 2: no JSON"),
    ("a.json", "[]", "a.json' has no rows"),
    ("a.jsonl", '{"a": 1}\n{"b": 1}\n', "a.jsonl, line 2: the keys b, expected a"),
    ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', "a column has values of different kinds"),
    ("a.fasta", "MAS\n", "a.fasta, line 1: a FASTA record starts with '>'"),
    ("a.fasta", ">A\n>B\nM\n", "the record 'A' has no sequence"),
    ("a.jsonk", "{}", "format of .*a.jsonk' is unknown. Did you mean 'json"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_bad_files_are_errors(name, text, message, tmp_path):
    write(tmp_path, {name: text})
    with pytest.raises(ValueError, match=message if ".*" in message else re.escape(message)):
        load_source(str(tmp_path / name))


def test_unreadable_files_are_errors(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR")
    with pytest.raises(OSError, match="not a readable Parquet file"):
        load_source(str(tmp_path / "a.parquet"))
    (tmp_path / "a.txt.gz").write_bytes(b"no gz")
    with pytest.raises(OSError, match=r"not a complete \.gz file"):
        load_source(str(tmp_path / "a.txt.gz"))


def test_bad_folders_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no files named by split .* found nothing"):
        load_source(str(tmp_path))
    write(tmp_path, {"train.csv": "a\n1\n", "test.jsonl": '{"a": 1}\n'})
    with pytest.raises(ValueError, match=r"different formats: test.jsonl, train.csv"):
        load_source(str(tmp_path))
    write(tmp_path, {"train.jsonl": '{"b": 1}\n'})
    with pytest.raises(ValueError, match=r"two files for train: train.csv, train.jsonl"):
        load_source(str(tmp_path))
    (tmp_path / "train.csv").unlink()
    with pytest.raises(ValueError, match=r"train.jsonl has the columns b, but .*test.jsonl has the columns a"):
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


@pytest.mark.parametrize(("size", "count"), [(0.1, 10), (0.07, 7), (0.0001, 1)])
def test_carved_validation(size, count):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"n": list(range(100))})})
    loaded, again = (hold_out_validation(splits, size) for _ in range(2))
    validation, rest = loaded["validation"]["n"][:], loaded["train"]["n"][:]
    assert len(validation) == count
    assert sorted(validation + rest) == list(range(100))
    assert validation == sorted(validation)
    assert rest == sorted(rest)
    assert again["validation"]["n"][:] == validation
    assert hold_out([str(n) for n in range(100)], size)[1] == [str(n) for n in validation]  # the rule for text files


def test_validation_that_cannot_be_carved():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"n": [1]})})
    with pytest.raises(ValueError, match=r"1 of 1 rows cannot be held out for validation\. Give more"):
        hold_out_validation(splits, 0.1)


def test_columns_are_checked():
    part = datasets.Dataset.from_dict(ROWS)
    splits = datasets.DatasetDict({"train": part})
    check_columns(splits, ["text", "label"])
    with pytest.raises(ValueError, match=r"no column 'txt'. Did you mean 'text'\? Columns: text, label"):
        check_columns(splits, ["txt", "label"])
    with pytest.raises(ValueError, match=r"no column 'labels'.*'label'.*--data.text_columns and --data.label_column"):
        check_columns(splits, ["text", "labels"])


def real(name: str) -> str:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the data set {name} is not at hand")
    return str(path)


@pytest.mark.real
def test_real_wikitext():
    loaded = load_source(real("lm/wikitext-2"))
    assert loaded.num_rows == {"train": 600, "validation": 60, "test": 60}
    vocabulary = {split: sum(len(text.split()) for text in part["text"]) for split, part in loaded.items()}
    assert vocabulary == {"train": 2_051_910, "validation": 213_886, "test": 241_211}


@pytest.mark.real
def test_real_proteins():
    loaded = load_source(real("protein/deeploc2_swissprot.csv.xz"))["train"]
    assert len(loaded) == 28303
    assert len(set(loaded["accession"])) == 28303
    assert set(loaded["partition"]) == set(range(5))
    fasta = load_source(real("protein/ecoli_K12_proteome_UP000000625.fasta"))["train"]
    assert len(fasta) == 4391
    assert sum(len(sequence) > 1024 for sequence in fasta["sequence"]) == 53
