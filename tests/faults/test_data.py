"""Data files with bad rows, cut short, or of another kind than their name says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.data.files import load_source
from hf_linear_attn.data.task_data import load_labelled
from hf_linear_attn.data.tasks import load_task
from hf_linear_attn.study.convert import convert
from tests.faults.checks import Observed, error_message
from tests.training.tiny_runs import convert_config, save_encoder, save_task


def loaded(path: Path, data: bytes) -> str:
    """The message of the error that reading these bytes raises; it must name the file."""
    path.write_bytes(data)
    return error_message(lambda: load_source(str(path)), (ValueError, OSError), path.name)


@pytest.mark.fault(group="data", what="a row of a csv file has too many columns", expected="file and line named")
def test_long_row(tmp_path: Path, observed: Observed) -> None:
    message = loaded(tmp_path / "rows.csv", b"text,label\nfine,1\nbroken,1,2\n")
    assert "line 3" in message, message
    observed(message)


@pytest.mark.fault(group="data", what="a row of a jsonl file is no JSON", expected="file and row named")
def test_no_json(tmp_path: Path, observed: Observed) -> None:
    message = loaded(tmp_path / "rows.jsonl", b'{"text": "a"}\n{"text": \n')
    assert "row 1" in message, message
    observed(message)


@pytest.mark.fault(
    group="data", what="bytes that are no UTF-8 in the middle of a csv file", expected="file and remedy named"
)
def test_no_utf8(tmp_path: Path, observed: Observed) -> None:
    message = loaded(tmp_path / "rows.csv", b"text,label\nfine,1\n\xff\xfe,1\n")
    assert "Convert it to UTF-8" in message, message
    observed(message)


@pytest.mark.fault(group="data", what="a column of jsonl holds numbers and text", expected="file, row and column named")
def test_mixed_kinds(tmp_path: Path, observed: Observed) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "x", "label": 1}\n{"text": "y", "label": "b"}\n')
    data = DataConfig(dataset=str(path))
    observed(error_message(lambda: load_labelled(data), ValueError, path.name, "row 1", "'label'", "'b'"))


@pytest.mark.fault(group="data", what="a gzip file ends half-way", expected="the file named")
def test_half_gzip(tmp_path: Path, observed: Observed) -> None:
    full = gzip.compress("".join(json.dumps({"text": str(number)}) + "\n" for number in range(1000)).encode())
    observed(loaded(tmp_path / "rows.jsonl.gz", full[: len(full) // 2]))


@pytest.mark.fault(group="data", what="a parquet file is noise", expected="the file named")
def test_parquet_noise(tmp_path: Path, observed: Observed) -> None:
    observed(loaded(tmp_path / "rows.parquet", b"PAR1" + bytes(range(256)) + b"PAR1"))


@pytest.mark.fault(group="data", what="a label that the task does not have", expected="file and row named")
def test_unknown_label(tmp_path: Path, observed: Observed) -> None:
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\nfine\t1\nbad\t7\n", encoding="utf-8")
    message = error_message(lambda: load_task("sst2", folder=str(tmp_path)), ValueError, "tsv", "'7'")
    assert "row 1 (" in message, message
    observed(message)


@pytest.mark.fault(
    group="data", what="training on a file with a bad row", expected="told before anything is written but the folder"
)
def test_training_on_a_bad_row(tmp_path: Path, observed: Observed) -> None:
    task = save_task(tmp_path / "task")
    with (task / "train.csv").open("a", encoding="utf-8") as file:
        file.write("no label here\n")
    settings = convert_config(save_encoder(tmp_path / "encoder"), task, tmp_path / "out")
    message = error_message(lambda: convert(settings), ValueError, "train.csv", "row 96")
    assert not list(tmp_path.glob("out/checkpoints/*")), "training had begun"
    observed(message)
