"""Where a model comes from, read without torch and Transformers, so that a wrong name is an error at once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .gguf import CONFIG_FILE, split_source


@contextmanager
def loading_errors(name: str, remedy: str = "Give a local folder or a repository on the Hub.") -> Iterator[None]:
    """Context manager that turns errors of loading into an OSError with the name of what is loaded and a remedy."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"{name} cannot be loaded ({reason}). {remedy}") from error


def is_path(source: str) -> bool:
    """Return whether this can only be a local file or folder, since no repository on the Hub is called so."""
    return source.startswith((".", "/", "~")) or len(Path(source).parts) > 2


def read_config_file(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of `config.json` in a folder or a repository on the Hub; for a GGUF file, which has none, {}.

    Raises:
        OSError: There is no such folder, repository or file, or it is not a JSON object.
        ImportError: The package of a short name is not installed (see `split_source`).
    """
    name, gguf = split_source(source)
    with loading_errors(f"The model {source!r}"):
        path = Path(name, gguf.get("gguf_file", CONFIG_FILE))
        if not path.parent.is_dir() and not is_path(name):
            if gguf:
                return {}  # the file is large, and is loaded later
            from huggingface_hub import hf_hub_download

            try:
                path = Path(hf_hub_download(name, CONFIG_FILE, revision=revision))
            except OSError as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".")
                raise FileNotFoundError(f"there is no such folder, and the Hub says: {reason}") from error
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path.name} in it" if path.parent.is_dir() else "no such folder")
        config = {} if gguf else json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} is not a JSON object")
    return config
