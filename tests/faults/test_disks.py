"""Disks that are full, and folders that nobody may write to."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.study.convert import convert
from hf_linear_attn.training.distillation import FinetuningTrainer
from tests.comparing import logits
from tests.faults.checks import Observed, error_message, file_hashes
from tests.inputs import token_ids
from tests.small import patched
from tests.tiny_models import BERT
from tests.training.tiny_runs import convert_config, save_encoder, save_task


@contextlib.contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond `limit` bytes: writing fails as on a full disk (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(tmp_path: Path, *options: str) -> Iterator[Path]:
    """A tmpfs of its own; needs the right to mount."""
    tmp_path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command `mount`")
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs is not allowed ({done.stderr.strip()})")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@contextlib.contextmanager
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user cannot write to: by its mode, and for root as a file system mounted read-only."""
    if os.geteuid() != 0:
        tmp_path.mkdir(exist_ok=True)
        tmp_path.chmod(0o555)
        try:
            yield tmp_path
        finally:
            tmp_path.chmod(0o755)
        return
    with mounted(tmp_path, "-o", "ro"):
        yield tmp_path


def command(*arguments: str) -> Callable[[], str]:
    """The command line in this process, its message as the error."""

    def call() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hf_linear_attn", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode:
            raise OSError(f"exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    return call


# --------------------------------------------------------------------------------------------------------------------
# Saving a model


@pytest.mark.fault(
    group="full disk",
    what="save_pretrained over an older checkpoint",
    expected="an error; the older checkpoint loads as before",
)
def test_saving_over_an_older_one(tmp_path: Path, observed: Observed) -> None:
    from hf_linear_attn.utils.files import atomic_folder

    target = tmp_path / "model"
    model = patched("hedgehog", BERT)
    with atomic_folder(target) as temporary:
        model.save_pretrained(temporary)
    before, outputs = file_hashes(target), logits(model, token_ids())

    def save() -> None:
        with largest_file(20_000), atomic_folder(target) as temporary:
            patched("elu", BERT).save_pretrained(temporary)

    message = error_message(save, OSError, "File too large")
    assert file_hashes(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "something was left behind"
    assert logits(hla.load_pretrained(str(target)), token_ids()).equal(outputs)
    observed(message)


@pytest.mark.fault(
    group="full disk", what="`patch` onto a disk of 64 KiB", expected="a message that says so; nothing left on the disk"
)
@pytest.mark.long
def test_patch_on_a_small_disk(tmp_path: Path, observed: Observed) -> None:
    BERT.build().save_pretrained(tmp_path / "source")
    with mounted(tmp_path / "disk", "-o", "size=64k") as disk:
        message = error_message(
            command("patch", str(tmp_path / "source"), str(disk / "out"), "--attention", "hedgehog"), OSError
        )
        assert "No space left" in message, message
        assert not list(disk.iterdir()), list(disk.iterdir())
    observed(message)


@pytest.mark.fault(group="full disk", what="`plan` onto a disk of 64 KiB", expected="a message that says so")
@pytest.mark.long
def test_plan_on_a_small_disk(tmp_path: Path, observed: Observed) -> None:
    from tests.training.tiny_runs import save_decoder, save_text

    save_decoder(tmp_path / "decoder")
    text = save_text(tmp_path / "text", 400)
    arguments = ["--budget", "5% perplexity", "--data.dataset", str(text), "--data.max_length", "32", "--steps", "2"]
    arguments += ["--quick", "--output"]
    with mounted(tmp_path / "disk", "-o", "size=64k") as disk:
        (disk / "filler").write_bytes(b"\0" * 60_000)
        observed(
            error_message(
                command("plan", str(tmp_path / "decoder"), *arguments, str(disk / "plan")), OSError, "No space"
            )
        )


# --------------------------------------------------------------------------------------------------------------------
# Training


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def prepared(tmp_path: Path) -> tuple[Path, Path]:
    return save_encoder(tmp_path / "encoder"), save_task(tmp_path / "task")


@pytest.mark.slow
@pytest.mark.fault(
    group="full disk",
    what="the disk fills up while a checkpoint is written",
    expected="an error; resumed, the weights of an undisturbed run",
)
def test_checkpoint_on_a_full_disk(tmp_path: Path, observed: Observed) -> None:
    encoder, task = prepared(tmp_path)
    convert(convert_config(encoder, task, tmp_path / "whole"))
    original = FinetuningTrainer._save_checkpoint

    def save(self: FinetuningTrainer, *args: object) -> None:
        if Path(self.args.output_dir).name == "distill" and self.state.global_step == 4:
            with largest_file(20_000):
                original(self, *args)
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinetuningTrainer, "_save_checkpoint", save)
        message = error_message(
            lambda: convert(convert_config(encoder, task, tmp_path / "out")), Exception, "File too large"
        )
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints" / "distill").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3"], names
    convert(convert_config(encoder, task, tmp_path / "out", resume=True))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    observed(message)


@pytest.mark.fault(
    group="full disk", what="too little room before the training starts", expected="told before the first step"
)
@pytest.mark.long
def test_a_disk_too_small_from_the_start(tmp_path: Path, observed: Observed) -> None:
    encoder, task = prepared(tmp_path)
    with mounted(tmp_path / "disk", "-o", "size=600k") as disk:
        observed(
            error_message(
                lambda: convert(convert_config(encoder, task, disk / "out")), OSError, "free", "Free some space"
            )
        )


# --------------------------------------------------------------------------------------------------------------------
# Folders that refuse


@pytest.mark.fault(group="read-only folder", what="`patch` into it", expected="a message that names the folder")
def test_patch_into_a_read_only_folder(tmp_path: Path, observed: Observed) -> None:
    BERT.build().save_pretrained(tmp_path / "source")
    with read_only(tmp_path / "locked") as locked:
        observed(
            error_message(
                command("patch", str(tmp_path / "source"), str(locked / "out"), "--attention", "elu"),
                OSError,
                str(locked),
            )
        )


@pytest.mark.fault(
    group="read-only folder",
    what="training into it",
    expected="a message that names the folder, before the model is read",
)
def test_train_into_a_read_only_folder(tmp_path: Path, observed: Observed) -> None:
    encoder, task = prepared(tmp_path)
    with read_only(tmp_path / "locked") as locked:
        observed(error_message(lambda: convert(convert_config(encoder, task, locked / "out")), OSError, str(locked)))


@pytest.mark.fault(group="read-only folder", what="loading a checkpoint from it", expected="works as from any other")
@pytest.mark.long
def test_load_from_a_read_only_folder(tmp_path: Path, observed: Observed) -> None:
    model = patched("hedgehog", BERT)
    with mounted(tmp_path / "disk") as disk:
        model.save_pretrained(disk / "model")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        assert logits(hla.load_pretrained(str(disk / "model")), token_ids()).equal(logits(model, token_ids()))
        assert main(["info", str(disk / "model")]) == 0
    observed("bit-equal outputs")
