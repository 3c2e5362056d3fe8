"""The recipes that measure what length is worth and what it costs: tiny models, made-up proteins and reviews."""

import csv
import json
import random

import numpy as np
import pytest
from sklearn.metrics import matthews_corrcoef

from recipes.benchmarks import long_costs, long_data, long_table
from tests.tiny_text import TOKENS
from tests.training.tiny_runs import save_encoder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    return long_table


STAGES = ("teacher", "transfer", "distill")
SMALL = [word for stage in STAGES for word in (f"--{stage}.max_steps", "2")]
SMALL += [word for stage in STAGES[:2] for word in (f"--{stage}.per_device_train_batch_size", "4")]
SMALL += ["--distill.gradient_accumulation_steps", "2", "--bf16", "false"]
TINY = ["hidden_size", "16", "num_hidden_layers", "2", "num_attention_heads", "2", "intermediate_size", "16"]
ESM = [
    word for name, value in zip(TINY[::2], TINY[1::2], strict=True) for word in (f"--config_overrides.{name}", value)
]


def save_proteins(path):
    """Five partitions with short and long sequences of both labels; every sequence tells its partition."""
    generator = random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "membrane", "partition"])
        for number in range(60):
            length = (20, 50, 1100)[number % 3]
            body = "".join(generator.choices("ACDEFGHIKL", k=length))
            writer.writerow([f"{'MNPQR'[number % 5]}{body}", f"{number // 3 % 2}.0", number % 5])


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def proteins(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    save_proteins(folder / "proteins.csv")
    arguments = ["proteins", "--source", str(folder / "proteins.csv"), "--work", str(folder / "work"), "--scored", "8"]
    arguments += ["--out", str(folder / "out.json"), "--data.max_length", "60", *SMALL, *ESM]
    assert table.main([*arguments, "--lengths", "40", "1200", "--variants", "softmax", "window"]) == 0
    return folder, arguments


def test_proteins_of_one_partition_stay_together(proteins):
    folder, _ = proteins
    files = {
        name: read(folder / "work" / "proteins" / f"{name}.csv") for name in ("short/train", "long/train", "scored")
    }
    letters = {name: {row["text"][0] for row in rows} for name, rows in files.items()}
    assert letters["scored"] <= set("QR")
    assert not (letters["short/train"] | letters["long/train"]) & set("QR")
    assert all(int(row["length"]) <= 58 for row in files["short/train"])
    assert {int(row["length"]) > 1024 for row in files["long/train"]} == {True, False}
    assert all(len(row["text"]) == int(row["length"]) for rows in files.values() for row in rows)


def test_a_row_a_mechanism_and_length(proteins):
    folder, _ = proteins
    rows = json.loads((folder / "out.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["variant"], row["length"]) for row in rows] == [
        *(("softmax", 40), ("window", 40)),
        *(("softmax", 1200), ("window", 1200)),
    ]
    long = [int(row["length"]) + 2 for row in read(folder / "work" / "proteins" / "long" / "train.csv")]
    for row in rows:
        assert row["strata"]["> 1,024"]["rows"] == 8
        assert row["training"]["truncated"] == sum(length > row["length"] for length in long)
        assert str(folder) not in json.dumps(row)
    assert rows[1]["parameters"] > rows[0]["parameters"]
    assert rows[0]["settings"]["config_overrides"]["position_embedding_type"] == "rotary"


def test_finished_rows_are_not_repeated_and_pieces_are_scored_by_the_same_model(table, proteins, monkeypatch):
    folder, arguments = proteins
    monkeypatch.setattr(table, "train_long", None)
    assert table.main([*arguments, "--lengths", "40", "1200", "--variants", "softmax", "window"]) == 0
    assert table.main([*arguments, "--lengths", "40", "1200", "--pieces"]) == 0
    rows = json.loads((folder / "out.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 5
    assert rows[-1]["pieces"]
    assert rows[-1]["length"] == 40
    assert rows[-1]["training"] == rows[0]["training"]


def test_costs_of_every_mechanism(proteins):
    folder, _ = proteins
    arguments = ["proteins", "--work", str(folder / "work"), "--lengths", "32", "64", "--inputs", "2", "--rounds", "2"]
    assert long_costs.main([*arguments, "--out", str(folder / "costs.json")]) == 0
    report = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
    assert set(report["lengths"]) == {"32", "64"}
    for costs_by_variant in report["lengths"].values():
        assert set(costs_by_variant) == {
            "softmax",
            "window",
            *(f"local + {name}" for name in ("softmax", "hedgehog", "luna")),
        }
        assert costs_by_variant["softmax"]["training"]["speedup"] == 1
        assert all(costs["training"]["seconds_per_1000"] > 0 for costs in costs_by_variant.values())
    assert report["longest"]["tokens"] == 1103


def test_reviews_have_their_positions_extended(table, tmp_path, monkeypatch):
    save_encoder(tmp_path / "encoder")
    (tmp_path / "imdb").mkdir()
    for name in ("train", "test"):
        with (tmp_path / "imdb" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(24):
                arguments = TOKENS[24:48] * (1 if number % 2 else 6)
                file.write(json.dumps({"text": " ".join(arguments[number:]), "label": number // 2 % 2}) + "\n")
    monkeypatch.setattr(long_data, "LONG_REVIEW", 90)
    part = table.PARTS["reviews"]
    monkeypatch.setitem(
        table.PARTS,
        "reviews",
        table.Part(part.write, {"all": (0, np.inf)}, (96, 150), {"softmax": None, "elu": {"default": "elu"}}),
    )
    arguments = ["reviews", "--source", str(tmp_path / "imdb"), "--model", str(tmp_path / "encoder"), "--short", "8"]
    arguments += ["--long", "6", "--scored", "6", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json")]
    assert table.main([*arguments, *SMALL, "--data.max_length", "96"]) == 0
    rows = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert [row["length"] for row in rows] == [96, 96, 150, 150]
    config = json.loads((tmp_path / "work/reviews/seed0/elu-150-2/model/config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == 150
    assert all(int(row["length"]) > 90 for row in read(tmp_path / "work" / "reviews" / "scored.csv"))


def test_pieces_cover_a_text_with_overlap(table):
    class Letters:
        def __call__(self, text, add_special_tokens=True, verbose=True):
            ids = [ord(letter) for letter in text]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    text = "abcdefghijklmnopqrstuvwxyz"
    pieces = table.encode_pieces(Letters(), text, 10)
    assert all(piece[0] == 1 and piece[-1] == 2 and len(piece) <= 10 for piece in pieces)
    bodies = ["".join(map(chr, piece[1:-1])) for piece in pieces]
    assert bodies == ["abcdefgh", "ghijklmn", "mnopqrst", "stuvwxyz"]
    assert table.encode_pieces(Letters(), "abc", 10) == [[1, 97, 98, 99, 2]]


def test_matthews_is_that_of_scikit_learn(table):
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=50), generator.random(50) < 0.4
    metrics = table.classification_metrics(scores, labels)
    assert metrics["mcc"] == pytest.approx(matthews_corrcoef(labels, scores > 0))
    assert 0 < metrics["mcc_error"] < 0.3
    assert table.matthews(np.array([0, 0, 5, 5])) == 0
