"""Folders that appear whole or not at all, and a look at the disk before the work begins."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

#: What `replace_folder` calls the old content of a folder.
OLD_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}\.old")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name `target` (replacing what was there) once all is written.

    `target` never holds half of anything: it is the old content or the new one. Where there was an old one it is away
    for the moment between two renames; `clear_leftovers` brings it back if the process dies in that moment.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    aside.mkdir()
    try:
        yield aside
        replace_folder(target, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_folder(target: Path, new: Path) -> None:
    """Rename `new` to `target`; what was there goes once the new one is in its place."""
    if not target.exists():
        new.rename(target)
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    # The new one is in its place: what cannot be removed now is a leftover, not a failure.
    shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write aside, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Plain data as JSON, whole."""
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written; an `.old` folder whose new one never came gets its name back."""
    for old in folder.glob(".*.old"):
        named = OLD_NAME.fullmatch(old.name)
        if named is None:
            continue
        target = old.with_name(named[1])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for part in folder.glob(".*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Make the folder and a file in it. Raises an OSError that names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{secrets.token_hex(4)}.part"
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"Cannot write to {str(folder)!r} ({error.strerror or error}). Choose another folder.") from error


def check_space(folder: Path, needed: int) -> None:
    """Raise an OSError unless the disk has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{str(folder)!r} has {free / 1e9:.2f} GB free; checkpoints and the result need about "
            f"{needed / 1e9:.2f} GB. Free some space, choose another folder, or keep fewer checkpoints (run.keep)."
        )


def training_bytes(model: nn.Module, keep: int) -> int:
    """Bytes of the checkpoints kept (one more while the next is written), the best weights and the result."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    return (keep + 1) * (weights + 8 * trained) + 3 * weights


def without_shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as safetensors take it: contiguous tensors, none of which shares its memory with another.

    Of several names of the same tensor (tied weights) the first is kept; what shares memory otherwise is copied.
    """
    seen: set[tuple[Any, ...]] = set()
    memories: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        held = tensor.detach().cpu().contiguous()
        memory = held.untyped_storage()
        if memory.data_ptr() in memories or memory.nbytes() != held.nbytes:
            held = held.clone()
        memories.add(memory.data_ptr())
        kept[name] = held
    return kept
