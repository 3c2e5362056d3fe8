"""Data files with bad rows, cut short, or of another kind than their name says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from hf_linear_attn.data.sources import load_source
from hf_linear_attn.data.tasks import load_task
from hf_linear_attn.training.convert import convert
from tests.faults.trying import fault, told
from tests.training.made_up import convert_settings, save_encoder, save_task


def loaded(path: Path, data: bytes) -> str:
    """The message of the error that reading these bytes raises; it must name the file."""
    path.write_bytes(data)
    return told(lambda: load_source(str(path)), (ValueError, OSError), path.name)


@fault("data", "a row of a csv file has too few columns", "file and line named")
def short_row(place: Path) -> str:
    message = loaded(place / "rows.csv", b"text,label\nfine,1\nbroken\n")
    assert "line 3" in message, message
    return message


@fault("data", "a row of a jsonl file is no JSON", "file and line named")
def no_json(place: Path) -> str:
    message = loaded(place / "rows.jsonl", b'{"text": "a"}\n{"text": \n')
    assert "line 2" in message, message
    return message


@fault("data", "bytes that are no UTF-8 in the middle of a csv file", "file and line named")
def no_utf8(place: Path) -> str:
    message = loaded(place / "rows.csv", b"text,label\nfine,1\n\xff\xfe,1\n")
    assert "line 3" in message, message
    return message


@fault("data", "a column of jsonl holds numbers and text", "the file named")
def mixed_kinds(place: Path) -> str:
    return loaded(place / "rows.jsonl", b'{"a": 1}\n{"a": "x"}\n')


@fault("data", "a gzip file ends half-way", "the file named")
def half_gzip(place: Path) -> str:
    whole = gzip.compress("".join(json.dumps({"text": str(number)}) + "\n" for number in range(1000)).encode())
    return loaded(place / "rows.jsonl.gz", whole[: len(whole) // 2])


@fault("data", "a parquet file is noise", "the file named")
def parquet_noise(place: Path) -> str:
    return loaded(place / "rows.parquet", b"PAR1" + bytes(range(256)) + b"PAR1")


@fault("data", "a label that the task does not have", "file and line named")
def unknown_label(place: Path) -> str:
    for name in ("train.tsv", "dev.tsv"):
        (place / name).write_text("sentence\tlabel\nfine\t1\nbad\t7\n", encoding="utf-8")
    message = told(lambda: load_task("sst2", folder=str(place)), ValueError, "tsv", "'7'")
    assert "line 3" in message, message
    return message


@fault("data", "training on a file with a bad row", "told before anything is written but the folder")
def training_on_a_bad_row(place: Path) -> str:
    task = save_task(place / "task")
    with (task / "train.csv").open("a", encoding="utf-8") as file:
        file.write("no label here\n")
    settings = convert_settings(save_encoder(place / "encoder"), task, place / "out")
    message = told(lambda: convert(settings), ValueError, "train.csv", "line 98")
    assert not list(place.glob("out/checkpoints/*")), "training had begun"
    return message
