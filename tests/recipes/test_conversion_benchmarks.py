"""The benchmarks of conversions on tiny models: GLUE, fidelity, long proteins."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.metrics import matthews_corrcoef

from hf_linear_attn.registry import ATTENTIONS
from recipes.benchmarks import conversion, proteins
from recipes.result_files import read_json
from tests.cases import entries, serves
from tests.recipes.benchmark_runs import rows_of
from tests.tiny_models import save_checkpoint
from tests.tiny_text import TOKENS
from tests.training.tiny_runs import save_encoder, save_task, save_text

BATCH = {"per_device_train_batch_size": 4}
STAGE = {"max_steps": 2, **BATCH}


def short_config(path: Path, name: str, **changes: Any) -> str:
    """The committed options of a benchmark, for two steps a stage."""
    options = yaml.safe_load((conversion.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    for section, values in {"transfer": STAGE, "distill": STAGE, "teacher": STAGE, **changes}.items():
        options[section] = {**options.get(section, {}), **values} if isinstance(values, dict) else values
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["glue", "proteins"])
def test_committed_options_can_be_read(name: str) -> None:
    assert conversion.read_options(conversion.CONFIGS / f"{name}.yaml")["save_steps"] == 0


def test_unknown_options_are_errors(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("data:\n  longest: 512\n", encoding="utf-8")
    with pytest.raises(TypeError, match="longest"):
        conversion.read_options(tmp_path / "wrong.yaml")


@pytest.mark.slow
def test_glue(tmp_path: Path) -> None:
    model, data = save_encoder(tmp_path / "encoder"), tmp_path / "rte"
    data.mkdir()
    tokens = [*TOKENS[24:40]]
    rows = [f"{k}\t{' '.join(tokens[k % 8 :])}\t{tokens[k % 5]}\t{('not_', '')[k % 2]}entailment" for k in range(24)]
    for name in ("train", "dev"):
        (data / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]), encoding="utf-8")
    config = short_config(tmp_path / "glue.yaml", "glue", data={"max_length": 32}, bf16=False, device="cpu")
    options: dict[str, Any] = {"model": str(model), "folder": str(tmp_path), "config": config, "tasks": ("rte",)}
    measured = rows_of("glue", tmp_path / "out", **options, mechanisms=("window of 8", "elu"), variants=("distilled",))
    assert [row["mechanism"] for row in measured] == ["softmax", "window of 8", "elu"]
    for row in measured:
        assert 0 <= row["distilled"][row["metric"]] <= 1
        assert ("patched" in row) is (row["mechanism"] != "softmax")
        assert ("transferred" in row) is (row["mechanism"] == "window of 8")


@pytest.mark.slow
def test_what_was_finetuned_with_other_options_is_not_taken(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"data": {"task": None, "text_columns": ["sentence"], "max_length": 16}, "bf16": False}
    options = conversion.read_options(short_config(tmp_path / "glue.yaml", "glue", **facts, device="cpu"))
    source = {"model": str(save_encoder(tmp_path / "encoder")), "output": tmp_path / "out"}
    source["data"] = {**options["data"], "dataset": str(save_task(tmp_path / "task"))}
    for _ in range(2):
        assert conversion.finetuned(options, "teacher", **source) == tmp_path / "out" / "model"
    options["teacher"]["max_steps"] = 3
    with pytest.raises(ValueError, match="max_steps was 2, now 3"):
        conversion.finetuned(options, "teacher", **source)


@pytest.mark.slow
def test_fidelity(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=64)
    options: dict[str, Any] = {"model": str(tmp_path / "llama"), "dataset": str(save_text(tmp_path / "text"))}
    rows = rows_of("fidelity", tmp_path / "out", **options, attention=("elu", "hedgehog"), steps=2)
    states = [(row["attention"], row["state"]) for row in rows]
    assert states == [("elu", "untrained"), ("hedgehog", "untrained"), ("hedgehog", "trained")]
    assert all(row["perplexity"] > 1 and row["output_error"] > 0 and row["kl"] > 0 for row in rows)


def test_fidelity_is_known_for_every_mechanism() -> None:
    results = read_json("fidelity.json")
    for model, facts in results["settings"]["models"].items():
        rows = [row for row in results["rows"] if row["model"] == model]
        causal = facts["kind"] == "decoder"
        assert {row["attention"] for row in rows} == {entry.name for entry in entries() if serves(entry, causal)}
        trained = {row["attention"] for row in rows if row["state"] == "trained"}
        assert trained == {row["attention"] for row in rows if ATTENTIONS.get(row["attention"]).learned}


# --------------------------------------------------------------------------------------------------------------------
# Proteins


def save_proteins(path: Path) -> str:
    """Five partitions with short and long sequences of both labels; every sequence tells its partition."""
    generator = random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "membrane", "partition"])
        for number in range(60):
            length = (20, 50, 1100)[number % 3]
            body = "".join(generator.choices("ACDEFGHIKL", k=length))
            writer.writerow([f"{'MNPQR'[number % 5]}{body}", f"{number // 3 % 2}.0", number % 5])
    return str(path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("proteins")
    tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    distill = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    options = {"config_overrides": tiny, "distill": {**STAGE, **distill}, "data": {"max_length": 60}, "bf16": False}
    config = short_config(folder / "proteins.yaml", "proteins", **options)
    work = {"source": save_proteins(folder / "proteins.csv"), "work": str(folder / "work"), "config": config}
    chosen: dict[str, Any] = {**work, "variants": ("softmax", "window"), "lengths": (40, 1200), "scored": 8}
    rows = rows_of("proteins", folder / "out", **chosen, pieces=("softmax",))
    return folder, chosen, rows


@pytest.mark.long
def test_proteins_of_one_partition_stay_together(trained: Any) -> None:
    folder, _, _ = trained
    files = {name: read(folder / "work" / f"{name}.csv") for name in ("short/train", "long/train", "scored")}
    letters = {name: {row["text"][0] for row in rows} for name, rows in files.items()}
    assert letters["scored"] <= set("QR")
    assert not (letters["short/train"] | letters["long/train"]) & set("QR")
    assert all(int(row["length"]) <= 58 for row in files["short/train"])
    assert {int(row["length"]) > 1024 for row in files["long/train"]} == {True, False}
    assert all(len(row["text"]) == int(row["length"]) for rows in files.values() for row in rows)


@pytest.mark.long
def test_a_row_for_each_variant_and_length(trained: Any) -> None:
    folder, _, rows = trained
    assert [(row["variant"], row["length"], row["pieces"]) for row in rows] == [
        *(("softmax", 40, False), ("window", 40, False)),
        *(("softmax", 1200, False), ("window", 1200, False)),
        ("softmax", 40, True),
    ]
    long = [int(row["length"]) + 2 for row in read(folder / "work" / "long" / "train.csv")]
    for row in rows:
        assert row["strata"]["> 1,024"]["rows"] == 8
        assert row["training"]["truncated"] == sum(length > row["length"] for length in long)
        assert str(folder) not in json.dumps(row)
    assert rows[1]["parameters"] > rows[0]["parameters"]
    assert rows[-1]["training"] == rows[0]["training"]  # pieces are scored by the same model


@pytest.mark.long
def test_costs_of_every_variant(trained: Any, tmp_path: Path) -> None:
    _, chosen, _ = trained
    small: dict[str, Any] = {"work": chosen["work"], "config": chosen["config"], "inputs": 2, "rounds": 3}
    rows = rows_of("proteins-costs", tmp_path / "out", **small, lengths=(32, 64))
    by_length = {length: [row for row in rows if row["length"] == length] for length in (32, 64)}
    assert all([row["variant"] for row in chosen] == list(proteins.VARIANTS) for chosen in by_length.values())
    assert all(row["training"]["seconds_per_1000"] > 0 for row in by_length[32])
    assert by_length[64][0]["training"]["speedup"] == 1


def test_pieces_cover_a_text_with_overlap() -> None:
    class Letters:
        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
            ids = [ord(letter) for letter in text]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    text = "abcdefghijklmnopqrstuvwxyz"
    pieces = proteins.encode_pieces(Letters(), text, 10)
    assert all(piece[0] == 1 and piece[-1] == 2 and len(piece) <= 10 for piece in pieces)
    assert ["".join(map(chr, piece[1:-1])) for piece in pieces] == ["abcdefgh", "ghijklmn", "mnopqrst", "stuvwxyz"]
    assert proteins.encode_pieces(Letters(), "abc", 10) == [[1, 97, 98, 99, 2]]


@pytest.mark.slow
def test_metrics_of_a_classification() -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=50), generator.random(50) < 0.4
    metrics = proteins.classification_metrics(scores, labels)
    assert metrics["mcc"] == pytest.approx(matthews_corrcoef(labels, scores > 0))
    drawn = generator.integers(0, 50, (2000, 50))
    spread = np.std([matthews_corrcoef(labels[rows], scores[rows] > 0) for rows in drawn])
    assert metrics["mcc_error"] == pytest.approx(spread, rel=0.1)
