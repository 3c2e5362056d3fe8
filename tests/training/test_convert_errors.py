"""What a conversion refuses before it trains, and the output folders that it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.study.stages import TrainingRun
from hf_linear_attn.study.study import check_study
from hf_linear_attn.training.options import FinetuneConfig
from tests.training.tiny_runs import convert_config, finetune_config, log_rows, quiet, weights


@pytest.mark.slow
def test_a_decoder_has_no_masked_language_model(folder: Path, tmp_path: Path) -> None:
    config = convert_config(
        folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", task_type="masked-lm",
        teacher__max_steps=None, data__text_columns=["text"],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no model for masked-lm of the type 'gpt2'\. Give another --task_type"):
        convert(config, console=quiet())


def test_a_missing_head_is_told_after_a_missing_file_and_a_missing_column(folder: Path, tmp_path: Path) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    changes: dict[str, Any] = {"teacher__max_steps": None, "task_type": "classification"}
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        convert(convert_config(paths[0], folder / "none.csv", paths[2], **changes), console=quiet())
    with pytest.raises(ValueError, match="no column 'sentences'"):
        convert(convert_config(*paths, **changes, data__text_columns=["sentences"]), console=quiet())
    with pytest.raises(
        ValueError, match=r"no head for this task \(it is a BertModel\).*convert with --teacher.num_train_epochs 3"
    ):
        convert(convert_config(*paths, **changes), console=quiet())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention": "hedgehogs"}, ValueError, "Did you mean 'hedgehog'"),
        ({"attention": "linformer-causal"}, NotImplementedError, "Use 'linformer'"),
        ({"options": {"feature_dims": 3}}, ValueError, "feature_dim"),
        ({"model": "nowhere/at-all"}, OSError, "nowhere/at-all"),
        ({"model": None}, ValueError, "^model: is missing"),
        ({"teacher__max_steps": None, "task_type": "classification"}, ValueError, r"teacher\.num_train_epochs 3"),
        ({"data__text_columns": ["sentense"]}, ValueError, "sentence"),
        ({"data__dataset": "nowhere.csv"}, OSError, "nowhere.csv"),
        ({"data__dataset": None}, ValueError, r"data\.task"),
        ({"data__label_column": "lable"}, ValueError, "label"),
        ({"data__text_columns": ["label"]}, ValueError, "text_columns: cannot be 'label'"),
        ({"data__label_column": "sentence"}, ValueError, "label_column: 'sentence' is a column of text"),
        ({"output": None}, ValueError, "^output: is missing"),
        ({"report_to": ["tensorbord"]}, ValueError, "tensorboard"),
        (
            {"task_type": "causal-lm", "data__text_columns": ["sentence"]},
            ValueError,
            "masked-lm",
        ),
    ],
)
def test_bad_options_are_errors_before_training(
    changes: dict[str, Any], error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    config = convert_config(folder / "encoder", folder / "task", tmp_path / "out", **changes)
    with pytest.raises(error, match=message):
        convert(config, console=quiet())
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_trained_on_the_text_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    rows = [f"{color} {number}\t{label}" for label, color in enumerate(("red", "blue")) for number in range(8)]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "sst2" / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    data = DataConfig(task="sst2", folder=str(tmp_path / "sst2"), max_length=16)
    config = FinetuneConfig(model_type="bert", train_tokenizer=260, data=data, output=str(tmp_path / "out"))
    run = TrainingRun(config.completed("classification"), "finetune", quiet())
    run.load_data()
    assert len(run.data.tokenizer) == 260


@pytest.mark.slow
def test_a_folder_of_a_run_that_was_refused_can_be_used(folder: Path, tmp_path: Path) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    with pytest.raises(ValueError, match="hedgehogs"):
        convert(convert_config(*paths, attention="hedgehogs"), console=quiet())
    steps = {"teacher__max_steps": 1, "transfer__max_steps": 1, "distill__max_steps": 1}
    assert convert(convert_config(*paths, **steps), console=quiet()).scores.distilled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimm": "adafactor"}, "has no field 'optimm'. Did you mean 'optim'"),
        ({"seed": 3}, "'seed' is an option of its own"),
    ],
)
def test_further_training_arguments(arguments: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(
            convert_config(folder / "encoder", folder / "task", tmp_path / "out", distill__arguments=arguments),
            console=quiet(),
        )
    config = finetune_config(
        folder / "encoder", folder / "task", tmp_path / "tuned", train__arguments={"optim": "sgd", "adam_beta1": 0.5}
    )
    assert finetune(config, console=quiet()).scores.trained


@pytest.mark.slow
def test_a_used_folder_is_not_overwritten(converted: tuple[Path, ConversionResult, str], folder: Path) -> None:
    out, _, _ = converted
    before = weights(out)
    with pytest.raises(ValueError, match=r"has an earlier result.*--resume.*--overwrite"):
        convert(convert_config(folder / "encoder", folder / "task", out), console=quiet())
    with pytest.raises(ValueError, match=r"distill\.max_steps was 40, now 6.*the same version"):
        convert(convert_config(folder / "encoder", folder / "task", out, resume=True), console=quiet())
    misspelt = convert_config(folder / "encoder", folder / "task", out, data__dataset="nowhere.csv", overwrite=True)
    with pytest.raises(OSError, match="nowhere"):
        convert(misspelt, console=quiet())
    assert weights(out) == before


def test_an_overwritten_run_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    finetune(finetune_config(*paths, train__max_steps=1), console=quiet())
    (paths[2] / "notes.txt").write_text("of the first run", encoding="utf-8")
    finetune(finetune_config(*paths, train__max_steps=2, overwrite=True), console=quiet())
    assert [row["step"] for row in log_rows(paths[2], "train") if "train_loss" in row] == [2]
    assert not (paths[2] / "notes.txt").exists()


def test_another_command_does_not_replace_a_conversion(converted: tuple[Path, ConversionResult, str]) -> None:
    out, _, _ = converted
    with pytest.raises(ValueError, match="not a result of this command"):
        check_study(out, overwrite=True)


def test_a_foreign_folder_is_not_touched(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="not a result of this command"):
            convert(
                convert_config(folder / "encoder", folder / "task", tmp_path, overwrite=overwrite),
                console=quiet(),
            )
    assert (tmp_path / "letter.txt").read_text(encoding="utf-8") == "dear"


def test_a_patched_model_is_not_a_teacher(
    converted: tuple[Path, ConversionResult, str], folder: Path, tmp_path: Path
) -> None:
    out, _, _ = converted
    with pytest.raises(ValueError, match="patched already"):
        convert(convert_config(out / "model", folder / "task", tmp_path / "out"), console=quiet())


def test_a_full_disk_is_an_error_before_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"GB free.*Free some space"):
        convert(convert_config(folder / "encoder", folder / "task", tmp_path / "out"), console=quiet())
    assert not list(tmp_path.iterdir())
