"""Tasks from local files: both layouts, row counts, and every kind of bad row named by file and line."""

from __future__ import annotations

import re

import pytest

from hf_linear_attn.data.tasks import METRICS, TASKS, load_task
from tests.data.tiny_data import SHARED, write

GLUE = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]

#: Training and development file of each task in the layout of the GLUE archive, with the rows they hold.
ARCHIVE = {
    "cola": ("CoLA/{}.tsv", 'gj04\t1\t\tIt "works\n', [('It "works', 1)]),
    "sst2": ("SST-2/{}.tsv", "sentence\tlabel\na bore \t0\nfine \t1\n", [("a bore ", 0), ("fine ", 1)]),
    "mrpc": (
        "MRPC/{}.tsv",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t12\t13\tShe said "so\tSo she said.\r\n',
        [('She said "so', "So she said.", 1)],
    ),
    "stsb": (
        "STS-B/{}.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tcaptions\tMSRvid\t2012\t1\tnone\tnone\tA cat.\tA dog.\t1.750\n",
        [("A cat.", "A dog.", 1.75)],
    ),
    "qqp": (
        "QQP/{}.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tWhy?\tHow\u2028so?\t1\n",
        [("Why?", "How\u2028so?", 1)],
    ),
    "qnli": ("QNLI/{}.tsv", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n", [("Who?", "He.", 1)]),
    "rte": ("RTE/{}.tsv", "index\tsentence1\tsentence2\tlabel\n0\tRain.\tWet.\tentailment\n", [("Rain.", "Wet.", 0)]),
    "wnli": (
        "WNLI/{}.tsv",
        "index\tsentence1\tsentence2\tlabel\n0\tIt fell.\tIce fell.\t1\n",
        [("It fell.", "Ice fell.", 1)],
    ),
}


def rows(split):
    return [tuple(row.values()) for row in split]


def test_the_tasks():
    assert sorted(name for name, _ in TASKS if name != "imdb") == GLUE
    for name, task in TASKS:
        assert task.name == name
        assert all(METRICS.get(metric).continuous is (task.labels is None) for metric in task.metrics)
    with pytest.raises(ValueError, match=r"Unknown task 'sst-2'. Did you mean 'sst2'"):
        load_task("sst-2")


@pytest.mark.parametrize("name", sorted(ARCHIVE))
@pytest.mark.parametrize("inside", [False, True], ids=["archive", "own folder"])
def test_the_layout_of_the_archive(name, inside, tmp_path):
    pattern, text, expected = ARCHIVE[name]
    write(tmp_path, {pattern.format("train"): text, pattern.format("dev"): text})
    loaded = load_task(name, folder=str(tmp_path / pattern.split("/")[0] if inside else tmp_path))
    task = TASKS.get(name)
    assert list(loaded) == ["train", "validation"]
    for split in loaded.values():
        assert split.column_names == [*task.columns, "label"]
        assert rows(split) == expected
    if task.labels is not None:
        assert tuple(loaded["train"].features["label"].names) == task.labels


def test_mnli_of_the_archive(tmp_path):
    header = ["index", "promptID", "pairID", "genre", *(f"parse{i}" for i in range(4)), "sentence1", "sentence2"]
    cells = ["0"] * 8 + ["A man.", "A person."]
    train = ["\t".join([*header, "label1", "gold_label"]), "\t".join([*cells, "neutral", "entailment"])]
    labels = [f"label{i}" for i in range(1, 6)]
    dev = ["\t".join([*header, *labels, "gold_label"]), "\t".join([*cells, *["neutral"] * 5, "contradiction"])]
    files = {"train": train, "dev_matched": dev, "dev_mismatched": dev}
    write(tmp_path, {f"MNLI/{name}.tsv": "\n".join(lines) + "\n" for name, lines in files.items()})
    loaded = load_task("mnli", folder=str(tmp_path))
    assert list(loaded) == ["train", "validation_matched", "validation_mismatched"]
    assert rows(loaded["train"]) == [("A man.", "A person.", 0)]
    assert rows(loaded["validation_mismatched"]) == [("A man.", "A person.", 2)]


def test_parts_of_a_task(tmp_path):
    text = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tneutral\n"
    write(tmp_path, {"train_subset.tsv": text, "dev_subset.tsv": text})
    loaded = load_task("mnli", folder=str(tmp_path))
    assert list(loaded) == ["train", "validation"]
    assert rows(loaded["train"]) == rows(loaded["validation"]) == [("a", "b", 1)]


def test_sts_benchmark_with_sources(tmp_path):
    row = "main\tMSRvid\t2012\t0001\t5.000\tA plane.\tAn air plane.\n"
    text = row + row.replace("5.000", "0.5").rstrip("\n") + "\thttp://a\thttp://b\n"
    write(tmp_path, {"sts-train.csv": text, "sts-dev.csv": text})
    loaded = load_task("stsb", folder=str(tmp_path))
    assert loaded["validation"]["label"][:] == [5.0, 0.5]
    assert loaded["train"].features["label"].dtype == "float32"


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_imdb(suffix, tmp_path):
    lines = '{"id": 0, "label": 0, "text": "dull\\u2028film"}\n{"id": 1, "label": 1, "text": "good"}\n'
    write(tmp_path, {f"imdb/train.jsonl{suffix}": lines, f"imdb/test.jsonl{suffix}": lines})
    loaded = load_task("imdb", folder=str(tmp_path))
    assert rows(loaded["validation"]) == [("dull\u2028film", 0), ("good", 1)]


BAD_ROWS = [
    ("sst2", "sentence\tlabel\nfine\t1\nbroken\n", "train.tsv, line 3: 1 columns, expected 2; found ['broken']"),
    ("sst2", "sentence\tlabel\nfine\tnice\t1\n", "train.tsv, line 2: 3 columns, expected 2"),
    ("sst2", "sentence\tlabel\n \t1\n", "train.tsv, line 2: column 'sentence' has no text: ' '"),
    ("sst2", "sentence\tlabel\nfine\t2\n", "train.tsv, line 2: unknown label '2'; expected one of 0, 1"),
    (
        "sst2",
        "sentence\tclass\nfine\t1\n",
        "train.tsv, line 1: there is no label; found sentence, class",
    ),
    ("sst2", "sentence\tlabel\n", "train.tsv' has no rows"),
    ("sst2", "\n", "train.tsv' is empty"),
    (
        "rte",
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n",
        "unknown label '1'; expected one of entailment, not_ent",
    ),
    ("cola", "gj04\t1\tIt works\n", "train.tsv, line 1: 3 columns, expected 4"),
    ("stsb", "sentence1\tsentence2\tscore\na\tb\thigh\n", "train.tsv, line 2: the score 'high' is not a number"),
    ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.1\n", "train.tsv, line 2: the score '5.1' is not between 0 and 5"),
    ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "train.tsv, line 2: the score 'nan' is not between 0 and 5"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_ROWS)
def test_bad_rows_are_errors(name, text, message, tmp_path):
    write(tmp_path, {"train.tsv": text, "dev.tsv": text})
    with pytest.raises(ValueError, match=re.escape(message)):
        load_task(name, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"label": 1}', "line 2: there is no text; found label"),
        ('{"label": 1, "text": null}', "line 2: column 'text' has no text: None"),
        ('{"label": "1.0", "text": "a"}', "line 2: unknown label '1.0'; expected one of 0, 1"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"label": 1', "line 2: no JSON"),
    ],
)
def test_bad_json_rows_are_errors(line, message, tmp_path):
    good = '{"label": 1, "text": "a"}\n'
    write(tmp_path, {"train.jsonl": good + line + "\n", "test.jsonl": good})
    with pytest.raises(ValueError, match=re.escape(message)):
        load_task("imdb", folder=str(tmp_path))


def test_bytes_that_are_no_text_are_errors(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\nfine\t1\n\xff\t1\n")
    (tmp_path / "dev.tsv").write_bytes(b"sentence\tlabel\nfine\t1\n")
    with pytest.raises(ValueError, match=re.escape("train.tsv, line 3: not UTF-8 text")):
        load_task("sst2", folder=str(tmp_path))


def test_a_validation_file_may_have_the_name_of_its_split(tmp_path):
    rows = "sentence\tlabel\nfine\t1\npoor\t0\n"
    write(tmp_path, {"train.tsv": rows, "validation.tsv": rows})
    assert load_task("sst2", folder=str(tmp_path))["validation"]["label"][:] == [1, 0]


def test_missing_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .* for the task 'rte'"):
        load_task("rte", folder=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"None of these files exists: .*rte/train.tsv, .*train_subset.tsv"):
        load_task("rte", folder=str(tmp_path))
    write(tmp_path, {"train.tsv": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"})
    with pytest.raises(
        FileNotFoundError, match=r"has a training file but none of dev.tsv, dev_subset.tsv, validation.tsv"
    ):
        load_task("rte", folder=str(tmp_path))
    (tmp_path / "train.jsonl.xz").write_bytes(b"no xz")
    write(tmp_path, {"test.jsonl": "{}"})
    with pytest.raises(OSError, match=r"is not a complete \.xz file"):
        load_task("imdb", folder=str(tmp_path))


def test_without_a_network_the_remedy_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"'nyu-mll/glue', config 'rte', revision 'main' .*--data.folder"):
        load_task("rte", revision="main")
    with pytest.raises(ValueError, match="revision 'main' is of a data set of the Hub"):
        load_task("rte", folder=str(tmp_path), revision="main")


def test_hub_sets_give_the_same_columns(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        part = datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": [1], "idx": [0]})
        return datasets.DatasetDict(dict.fromkeys(("train", "validation_matched", "validation_mismatched"), part))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_task("mnli", revision="abc")
    assert calls == [(("nyu-mll/glue", "mnli"), {"revision": "abc"})]
    assert list(loaded) == ["train", "validation_matched", "validation_mismatched"]
    assert loaded["train"].column_names == ["premise", "hypothesis", "label"]
    with pytest.raises(ValueError, match="'stanfordnlp/imdb' has no split test; it has"):
        load_task("imdb")


@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [
        ("sst2", 67349, 872),
        ("cola", 8551, 1043),
        ("mrpc", 3668, 408),
        ("rte", 2490, 277),
        ("stsb", 5749, 1500),
        ("qqp", 8999, 1000),
        ("mnli", 8999, 1000),
        ("wnli", 635, 71),
        ("imdb", 25000, 25000),
    ],
)
@pytest.mark.real
def test_real_files(name, train, validation):
    folder = SHARED / ("imdb" if name == "imdb" else "glue")
    if not folder.is_dir():
        pytest.skip(f"the data set {folder.name} is not at hand")
    loaded = load_task(name, folder=str(folder))
    assert loaded.num_rows == {"train": train, "validation": validation}
    if TASKS.get(name).labels is not None:
        assert set(loaded["validation"]["label"]) == set(range(len(TASKS.get(name).labels)))
