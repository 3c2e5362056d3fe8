"""Atomic writes: a file or folder appears under its name completely or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any


def _temporary_name(target: Path, suffix: str) -> Path:
    """Return a name of the form `.NAME.xxxxxxxx.SUFFIX`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{suffix}")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder, which is renamed to `target` at the end, unless the block raises.

    The folder `target` holds either its previous content or the new content, never a mixture. If the process is killed
    between the two renames that replace an existing folder, `remove_partial_files` restores the previous content.
    """
    temporary = _temporary_name(target, "part")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"Cannot write to {str(target)!r} ({error.strerror or error}). Choose another folder.") from error
    try:
        yield temporary
        replace_folder(target, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(target: Path, new: Path) -> None:
    """Rename the folder `new` to `target`, and remove what `target` held before."""
    if not target.exists():
        new.rename(target)
        return
    backup = _temporary_name(target, "old")
    target.rename(backup)
    try:
        new.rename(target)
    except BaseException:
        backup.rename(target)
        raise
    # The new folder has its name: a backup that cannot be removed is a leftover, not a failure.
    shutil.rmtree(backup, ignore_errors=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it to `path`. Text is written as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path, "part")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON-compatible data to a file, atomically (see `utils.environment.json_safe` for other data)."""
    atomic_write(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def remove_partial_files(folder: Path) -> None:
    """Remove what a killed process left unfinished in a folder, and restore a backup whose replacement never came."""
    for backup in folder.glob(f".?*.{'[0-9a-f]' * 8}.old"):
        target = backup.with_name(backup.name[1 : -len(".xxxxxxxx.old")])
        if target.exists():
            shutil.rmtree(backup, ignore_errors=True)
        else:
            backup.rename(target)
    for partial in folder.glob(".*.part"):
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)


def check_output(
    output: str | Path,
    results: Sequence[str],
    *,
    overwrite: bool = False,
    resume: bool | None = None,
    source: str | None = None,
    option: str = "--output",
) -> None:
    """Check, without writing, that a command may write to a folder. Every command has this rule.

    A new or an empty folder may be written to. A folder with an earlier result of the command is continued with
    `resume` (None: the command cannot continue one), replaced with `overwrite`, and refused otherwise. A folder with
    other files is refused in any case, and so is one that contains the model that the command reads, its `source`. A
    folder with one of the files `results` holds a result of the command. Messages name the folder by its `option`.

    Raises:
        ValueError: The folder must not be written to.
        OSError: It is a file or lies in one, or its parent folder is not writable.
    """
    folder = Path(output)
    name = f"{option} {str(output)!r}"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{name} is a file. Name a folder.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(f"Cannot write to {name}: {str(existing)!r} is not a writable folder. Name another folder.")
    contents = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not contents:
        return
    if source is not None and Path(source).is_dir() and Path(source).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name} contains the model {source!r}, which would be lost. Name another folder.")
    if not any((folder / result).exists() for result in results):
        listed = ", ".join(contents[:3]) + (", …" if len(contents) > 3 else "")
        raise ValueError(f"{name} has files that are not a result of this command ({listed}). Name a new folder.")
    if not (overwrite or resume):
        continuation = "" if resume is None else "continue it (--resume), "
        remedy = f"{continuation}replace it (--overwrite), or name a new folder"
        raise ValueError(f"{name} has an earlier result: {remedy}.")


@contextmanager
def open_output(folder: Path, results: Sequence[str], *, overwrite: bool = False) -> Iterator[None]:
    """Context manager that creates an output folder, and removes it if the block raises before there is a result.

    That is one of the files `results`. A folder that had files before stays. With `overwrite` everything in it, which
    `check_output` has checked, is removed first. An OSError if the folder cannot be created or written to.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    is_new = not folder.exists()
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as probe:
                probe.write(b"\0" * 4096)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"Cannot write to {str(folder)!r} ({reason}). Choose another folder.") from error
        if overwrite:
            clear_folder(folder)
        is_new = not any(folder.iterdir())
        yield
    except BaseException:
        if folder.is_dir() and is_new and not any((folder / result).exists() for result in results):
            clear_folder(folder)
            for path in created:
                path.rmdir()
        raise


def clear_folder(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_disk_space(folder: Path, required: int, remedy: str = "Free some space or choose another folder.") -> None:
    """Raise an OSError, which ends with the remedy, if the disk of a folder has fewer than `required` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < required:
        needed = f"about {required / 1e9:.2f} GB are needed"
        raise OSError(f"{str(folder)!r} has {free / 1e9:.2f} GB free; {needed}. {remedy}")
