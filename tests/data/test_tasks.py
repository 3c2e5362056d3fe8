"""Tasks from local files: both layouts, row counts, and every kind of bad row named by file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_linear_attn.data.metrics import METRICS
from hf_linear_attn.data.tasks import TASKS
from hf_linear_attn.data.tasks import load_task as load_source
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


def load_task(name, **options):
    return load_source(name, **options).splits


def rows(split):
    return [tuple(row.values()) for row in split]


def test_the_tasks():
    assert sorted(name for name, _ in TASKS if name != "imdb") == GLUE
    for name, task in TASKS:
        assert task.name == name
        assert all((METRICS.get(metric).problem == "regression") is (task.labels is None) for metric in task.metrics)
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


SST2 = "sentence\tlabel\n"
PAIRS = "index\tsentence1\tsentence2\tlabel\n"
SCORES = "sentence1\tsentence2\tscore\n"
BAD_ROWS = [
    ("sst2", SST2 + "fine\t1\nbroken\n", "row 1 (the first is 0): the column 'label' has '', and the task"),
    ("sst2", SST2 + "fine\t1\na\tnice\t1\n", "train.tsv' cannot be read (Error tokenizing data. C error: Expected 2"),
    (
        "sst2",
        SST2 + " \t1\n",
        "train.tsv, row 0 (the first is 0): the column 'sentence' has ' ', which",
    ),
    ("sst2", SST2 + "fine\t2\n", "has '2', and the task 'sst2' has one of negative, positive or its number"),
    ("sst2", "sentence\tclass\nfine\t1\n", "train.tsv: there is no label; found sentence, class"),
    ("sst2", SST2, "train.tsv' has no rows"),
    ("sst2", "", "train.tsv' cannot be read (No columns to parse from file)"),
    ("rte", PAIRS + "0\ta\tb\tneutral\n", "'neutral', and the task 'rte' has one of entailment, not_entailment or its"),
    ("cola", "gj04\t1\tIt works\n", "train.tsv, row 0 (the first is 0): the column 'sentence' has ''"),
    ("stsb", SCORES + "a\tb\thigh\n", "train.tsv, row 0 (the first is 0): the column 'score' has 'high'"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_ROWS)
def test_bad_rows_are_errors(name, text, message, tmp_path):
    write(tmp_path, {"train.tsv": text, "dev.tsv": text})
    with pytest.raises(ValueError, match=re.escape(message)):
        load_task(name, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"label": 1, "text": null}', "row 1 (the first is 0): the column 'text' has None, which is no"),
        ('{"label": 2, "text": "a"}', "the column 'label' has 2, and the task 'imdb' has one of neg, pos"),
        (
            '{"label": null, "text": "a"}',
            "train.jsonl, row 1 (the first is 0): the column 'label' has None, and the task",
        ),
        ('{"label": 1', "train.jsonl' cannot be read"),
    ],
)
def test_bad_json_rows_are_errors(line, message, tmp_path):
    good = '{"label": 1, "text": "a"}\n'
    write(tmp_path, {"train.jsonl": good + line + "\n", "test.jsonl": good})
    with pytest.raises(ValueError, match=re.escape(message)):
        load_task("imdb", folder=str(tmp_path))


def test_a_validation_file_may_have_the_name_of_its_split(tmp_path):
    rows = "sentence\tlabel\nfine\t1\npoor\t0\n"
    write(tmp_path, {"train.tsv": rows, "validation.tsv": rows})
    assert load_task("sst2", folder=str(tmp_path))["validation"]["label"][:] == [1, 0]


def test_missing_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .* for the task 'rte'"):
        load_task("rte", folder=str(tmp_path / "none"))
    with pytest.raises(
        FileNotFoundError, match=r"None of these files exists: .*rte/train.tsv, .*train.tsv; nor as .gz"
    ):
        load_task("rte", folder=str(tmp_path))
    write(tmp_path, {"train.tsv": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"})
    with pytest.raises(FileNotFoundError, match=r"has a training file but none of dev.tsv, validation.tsv"):
        load_task("rte", folder=str(tmp_path))
    (tmp_path / "train.jsonl.xz").write_bytes(b"no xz")
    write(tmp_path, {"test.jsonl": "{}"})
    with pytest.raises(ValueError, match=r"train.jsonl.xz' cannot be read .*fetch it again"):
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


def by_hand(path: Path, task: str) -> list[tuple[str | float, ...]]:
    """The texts and the label of each row of a file of GLUE, from lines that are split at tabs."""
    lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    rows = [line.removesuffix("\r").split("\t") for line in lines]
    if task == "cola":
        return [(row[3], int(row[1])) for row in rows]
    if task == "stsb":
        return [(row[5], row[6], float(row[4])) for row in rows]
    columns = {
        "sst2": ("sentence", "label"),
        "mrpc": ("#1 String", "#2 String", "Quality"),
        "qqp": ("question1", "question2", "is_duplicate"),
    }
    numbers = [rows[0].index(name) for name in columns.get(task, ("sentence1", "sentence2", "label"))]
    names = {"rte": ["entailment", "not_entailment"], "mnli": ["entailment", "neutral", "contradiction"]}.get(task, [])
    every = [[row[column] for column in numbers] for row in rows[1:]]
    return [(*texts, names.index(label) if label in names else int(label)) for *texts, label in every]


#: Folder and files of a task in the shared data, where they have the names of the archive.
REAL = {
    "sst2": ("SST-2", "train.tsv", "dev.tsv", 67349, 872),
    "cola": ("CoLA", "train.tsv", "dev.tsv", 8551, 1043),
    "mrpc": ("MRPC", "train.tsv", "dev.tsv", 3668, 408),
    "rte": ("RTE", "train.tsv", "dev.tsv", 2490, 277),
    "stsb": ("STS-B", "sts-train.csv", "sts-dev.csv", 5749, 1500),
    "wnli": ("WNLI", "train.tsv", "dev.tsv", 635, 71),
    "qqp": ("QQP", "train_subset.tsv", "dev_subset.tsv", 8999, 1000),
    "mnli": ("MNLI", "train_subset.tsv", "dev_subset.tsv", 8999, 1000),
}


@pytest.mark.real
@pytest.mark.parametrize("task", sorted(REAL))
def test_real_files_keep_every_row_and_every_text(task, tmp_path):
    name, train, dev, *counts = REAL[task]
    folder = SHARED / "glue" / name
    if not folder.is_dir():
        pytest.skip(f"the data set {name} is not at hand")
    expected = {"train": by_hand(folder / train, task), "validation": by_hand(folder / dev, task)}
    assert [len(part) for part in expected.values()] == counts
    if task in ("qqp", "mnli"):  # parts of the tasks, which are given the archive's names and columns
        for source, targets in ((train, ["train"]), (dev, ["dev", "dev_matched", "dev_mismatched"])):
            text = (folder / source).read_text(encoding="utf-8")
            write(tmp_path, {f"{target}.tsv": text.replace("\tlabel\n", "\tgold_label\n", 1) for target in targets})
        folder = tmp_path
    loaded = load_task(task, folder=str(folder))
    for split, part in loaded.items():
        by_line = expected[split.partition("_")[0]]
        assert [row[:-1] for row in rows(part)] == [row[:-1] for row in by_line]
        assert part["label"][:] == pytest.approx([row[-1] for row in by_line])


@pytest.mark.real
def test_real_reviews():
    if not (SHARED / "imdb").is_dir():
        pytest.skip("the data set imdb is not at hand")
    loaded = load_task("imdb", folder=str(SHARED))
    assert loaded.num_rows == {"train": 25000, "validation": 25000}
    assert sum(loaded["validation"]["label"]) == 12500
