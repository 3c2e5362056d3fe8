"""The way in for the command line and for the recipes: words and a YAML file become a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .options import ConvertSettings, FinetuneSettings
from .settings import as_mapping, read_arguments, read_settings

SETTINGS: dict[str, type] = {"convert": ConvertSettings, "finetune": FinetuneSettings}


def settings_class(verb: str) -> type:
    """The settings of a verb."""
    return SETTINGS[verb]


def run_settings(verb: str, config: str | None, source: str | None, words: Sequence[str], *, show: bool = False) -> int:
    """Read the settings, run them, and return the exit code.

    Raises:
        ValueError, OSError, ImportError: settings, data or folders that cannot be served.
    """
    given = read_arguments(words)
    if source is not None:
        if "model.source" in given:
            raise ValueError(f"The model is given twice: {source!r} and --model.source {given['model.source']!r}.")
        given["model.source"] = source
    settings: Any = read_settings(SETTINGS[verb], config, given)
    if show:
        import yaml

        sys.stdout.write(yaml.safe_dump(as_mapping(settings), sort_keys=False, allow_unicode=True))
        return 0
    from . import convert
    from .loop import InterruptedRunError

    try:
        getattr(convert, verb)(settings)
    except InterruptedRunError as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.code
    return 0


def recipe(verb: str, config: str, words: Sequence[str] | None = None) -> int:
    """The body of a recipe script: its own YAML file, or the one of `--config`, with dotted flags over it."""
    from ..cli import main

    rest = list(sys.argv[1:] if words is None else words)
    if not any(word == "--config" or word.startswith("--config=") for word in rest):
        rest = ["--config", config, *rest]
    return main([verb, *rest])
