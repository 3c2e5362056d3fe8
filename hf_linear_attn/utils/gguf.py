"""Checkpoints in GGUF files, the format of llama.cpp."""

from pathlib import Path, PurePosixPath
from typing import Any

from .extras import require_packages

SUFFIX = ".gguf"


def split_source(source: str) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `from_pretrained` for a checkpoint: its folder or repository, and keyword arguments.

    These are `gguf_file` for the name of a GGUF file in a folder or a repository (`FOLDER/FILE.gguf`; an ImportError if
    the package `gguf` is missing), or else none.
    """
    path = PurePosixPath(source)
    if path.suffix.lower() != SUFFIX:
        return source, {}
    require_packages("gguf", extra="gguf", purpose=f"Reading {source!r}")
    owner_and_name = 2  # parts of the name of a repository; what follows is a file's path in it
    is_local = path.is_absolute() or Path(source).parent.is_dir()
    parts = len(path.parts) - 1 if is_local else owner_and_name
    return str(PurePosixPath(*path.parts[:parts])), {"gguf_file": str(PurePosixPath(*path.parts[parts:]))}


def dequantized(model: Any) -> Any:
    """Return a model read from a GGUF file as an ordinary one, which can be trained and saved.

    Transformers unpacks the weights while it loads them, but still takes the model for a quantized one.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    return model
