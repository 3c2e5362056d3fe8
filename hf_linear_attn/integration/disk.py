"""Weights that cannot be written: one kind of error, whoever writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

#: In the RuntimeErrors that torch raises where it cannot write a file.
TORCH_WRITERS = ("PytorchStreamWriter", "iostream error", "unexpected pos")


@contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Raise what safetensors and torch make of a full or failing disk as an OSError that names the folder."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCH_WRITERS):
            raise
        raise OSError(
            f"Cannot write weights to {str(folder)!r} ({' '.join(str(error).split())}). Free some space, or choose "
            "another folder."
        ) from error
