"""Disks that are full, and folders that nobody may write to."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.training.convert import convert
from hf_linear_attn.training.loop import Loop
from tests.faults.trying import NotPossibleHereError, fault, fingerprint, told
from tests.helpers import BERT, logits, patched, token_ids
from tests.training.made_up import convert_settings, save_encoder, save_task


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
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A tmpfs of its own; needs the right to mount."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotPossibleHereError("there is no command `mount`") from error
    if done.returncode:
        raise NotPossibleHereError(f"mounting a small tmpfs is not allowed ({done.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[Path]:
    """A folder that this user cannot write to: by its mode, and for root as a file system mounted read-only."""
    if os.geteuid() != 0:
        place.mkdir(exist_ok=True)
        place.chmod(0o555)
        try:
            yield place
        finally:
            place.chmod(0o755)
        return
    with mounted(place, "-o", "ro"):
        yield place


def command(*words: str) -> Callable[[], str]:
    """The command line in this process, its message as the error."""

    def call() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hf_linear_attn", *words],
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


@fault("full disk", "save_pretrained over an older checkpoint", "an error; the older checkpoint loads as before")
def saving_over_an_older_one(place: Path) -> str:
    from hf_linear_attn.training.saving import whole_folder

    target = place / "model"
    model = patched("hedgehog", BERT)
    with whole_folder(target) as aside:
        model.save_pretrained(aside)
    before, outputs = fingerprint(target), logits(model, token_ids())

    def save() -> None:
        with largest_file(20_000), whole_folder(target) as aside:
            patched("elu", BERT).save_pretrained(aside)

    message = told(save, OSError, "File too large")
    assert fingerprint(target) == before
    assert [path.name for path in place.iterdir()] == ["model"], "something was left behind"
    assert logits(hla.load_pretrained(str(target)), token_ids()).equal(outputs)
    return message


@fault("full disk", "`patch` onto a disk of 64 KiB", "a message that says so; nothing left on the disk", quick=False)
def patch_on_a_small_disk(place: Path) -> str:
    BERT.build().save_pretrained(place / "source")
    with mounted(place / "disk", "-o", "size=64k") as disk:
        message = told(command("patch", str(place / "source"), str(disk / "out"), "--attention", "hedgehog"), OSError)
        assert "No space left" in message, message
        assert not list(disk.iterdir()), list(disk.iterdir())
    return message


@fault("full disk", "`plan` onto a disk of 64 KiB", "a message that says so", quick=False)
def plan_on_a_small_disk(place: Path) -> str:
    from tests.training.made_up import save_decoder, save_text

    save_decoder(place / "decoder")
    text = save_text(place / "text", 400)
    words = ["--budget", "5% perplexity", "--text", str(text), "--sequence-length", "32", "--steps", "2", "--quick"]
    with mounted(place / "disk", "-o", "size=64k") as disk:
        (disk / "filler").write_bytes(b"\0" * 60_000)
        return told(command("plan", str(place / "decoder"), *words, "--out", str(disk / "plan")), OSError, "No space")


# --------------------------------------------------------------------------------------------------------------------
# Training


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def prepared(place: Path) -> tuple[Path, Path]:
    return save_encoder(place / "encoder"), save_task(place / "task")


@fault(
    "full disk",
    "the disk fills up while a checkpoint is written",
    "an error; resumed, the weights of an undisturbed run",
)
def checkpoint_on_a_full_disk(place: Path) -> str:
    encoder, task = prepared(place)
    convert(convert_settings(encoder, task, place / "whole"))
    original = Loop.save_checkpoint

    def save(self: Loop) -> None:
        if self.name == "distill" and self.progress.step == 4:
            with largest_file(20_000):
                original(self)
        original(self)

    Loop.save_checkpoint = save  # type: ignore[method-assign]
    try:
        message = told(lambda: convert(convert_settings(encoder, task, place / "out")), OSError, "File too large")
    finally:
        Loop.save_checkpoint = original  # type: ignore[method-assign]
    kept = sorted(path.name for path in (place / "out" / "checkpoints" / "distill").glob("step-*"))
    assert kept == ["step-00000002"], kept
    convert(convert_settings(encoder, task, place / "out", run__resume=True))
    assert weights(place / "out") == weights(place / "whole")
    return message


@fault("full disk", "too little room before the training starts", "told before the first step", quick=False)
def no_room_from_the_start(place: Path) -> str:
    encoder, task = prepared(place)
    with mounted(place / "disk", "-o", "size=600k") as disk:
        return told(lambda: convert(convert_settings(encoder, task, disk / "out")), OSError, "free", "run.keep")


# --------------------------------------------------------------------------------------------------------------------
# Folders that refuse


@fault("read-only folder", "`patch` into it", "a message that names the folder")
def patch_into_a_read_only_folder(place: Path) -> str:
    BERT.build().save_pretrained(place / "source")
    with read_only(place / "locked") as locked:
        return told(
            command("patch", str(place / "source"), str(locked / "out"), "--attention", "elu"), OSError, str(locked)
        )


@fault("read-only folder", "training into it", "a message that names the folder, before the model is read")
def train_into_a_read_only_folder(place: Path) -> str:
    encoder, task = prepared(place)
    with read_only(place / "locked") as locked:
        return told(lambda: convert(convert_settings(encoder, task, locked / "out")), OSError, str(locked))


@fault("read-only folder", "loading a checkpoint from it", "works as from any other", quick=False)
def load_from_a_read_only_folder(place: Path) -> str:
    model = patched("hedgehog", BERT)
    with mounted(place / "disk") as disk:
        model.save_pretrained(disk / "model")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        assert logits(hla.load_pretrained(str(disk / "model")), token_ids()).equal(logits(model, token_ids()))
        assert main(["info", str(disk / "model")]) == 0
    return "bit-equal outputs"
