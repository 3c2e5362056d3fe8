"""A tokenizer with pairs and a mask token, and small files."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.tiny_text import tiny_tokenizer

PACK = {"": lambda raw: raw, ".xz": lzma.compress, ".gz": gzip.compress}

#: The folder of real data sets, where it is at hand.
SHARED = Path(__file__).parents[3] / "shared" / "data"


def tokenizer(*, unknown: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with everything that the encoders of pairs and of blocks use."""
    return tiny_tokenizer(mask=True, eos=True, token_types=True, unknown=unknown)


def write(folder: Path, files: dict[str, str]) -> Path:
    """Text files, packed if their names say so."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](text.encode()))
    return folder
