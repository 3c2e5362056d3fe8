"""What conversion costs: GLUE, perplexity, and the fidelity of every mechanism, beside equally trained exact models."""

import copy
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint
from hf_linear_attn.data.config import PYTHON_DOCUMENTATION, DataConfig
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.text import evenly_spread, packed_rows, pad_token, padded_batches, text_rows
from hf_linear_attn.demo import resolve_model
from hf_linear_attn.measure.embedding import EmbeddingCosine, sentence_embeddings
from hf_linear_attn.measure.token_loss import TokenLoss, strided_windows
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.study.evaluated_model import task_type_of
from hf_linear_attn.study.models import load_tokenizer
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig, StageConfig, TrainingRunConfig
from hf_linear_attn.utils.models import shared_copy
from hf_linear_attn.utils.options import make_config, to_dict

from . import workloads
from .runner import Cell, Cells, Rows

CONFIGS = Path(__file__).parent / "configs"
CONTROL = "softmax"
STAGES = ("teacher", "patched", "transferred", "distilled")


Options = dict[str, Any]


def read_options(path: str | Path) -> Options:
    """Return all options of a conversion, those of a YAML file among them, with those of a model without a checkpoint.

    Raises:
        TypeError, ValueError: An unknown option, or a value that it does not take.
    """
    options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    pretraining = {name: options.pop(name) for name in ("model_type", "config_overrides") if name in options}
    return {**to_dict(make_config(ConvertConfig, None, options).completed("classification")), **pretraining}


def finetuned(options: Options, stage: str, *, output: Path, **changes: Any) -> Path:
    """Fine-tune with one stage of the options of a conversion, unless that is done; return the folder of the model.

    Raises:
        ValueError: That was done in this folder with other options.
    """
    train = {name: value for name, value in options[stage].items() if name in StageConfig.__dataclass_fields__}
    shared = {name: value for name, value in options.items() if name in FinetuneConfig.__dataclass_fields__}
    fixed = {"attention": None, "train": train, "output": str(output), "resume": output.exists()}
    hla.finetune(**shared | changes | fixed)
    return output / "model"


# --------------------------------------------------------------------------------------------------------------------
# GLUE

#: Rows of the table, and the options that each changes. In their default sizes the window and the slots cover most of
#: these short inputs: smaller ones show what the rest is worth.
MECHANISMS: dict[str, dict[str, Any]] = {
    "window": {},
    "hedgehog": {},
    "window of 8": {"attention": "window", "options": {"window_size": 8}},
    "window of 8, nothing": {"attention": "window", "options": {"window_size": 8, "mix_init": CLOSED_MIX}},
    **{
        name: {"attention": "window", "options": {"window_size": width, "feature_map": "hedgehog"}}
        for name, width in {
            "window, hedgehog": 64,
            "window of 8, hedgehog": 8,
            "window of 16, hedgehog": 16,
            "hedgehog with global tokens": 1,
        }.items()
    },
    "linformer of 16": {"attention": "linformer", "options": {"num_slots": 16}},
    "linformer of 32": {"attention": "linformer", "options": {"num_slots": 32}},
    "linformer of 64": {"attention": "linformer", "options": {"num_slots": 64}},
    "elu": {},
    "favor+": {},
}
for _name in ("window of 16, hedgehog", "hedgehog with global tokens"):
    MECHANISMS[f"{_name}, 20 % of the heads exact"] = {**MECHANISMS[_name], "exact_share": 0.2}

#: Kinds of runs, and what each changes in the last training.
VARIANTS: dict[str, dict[str, float]] = {
    "distilled": {},
    "no distillation": {"logits_weight": 0.0, "hidden_weight": 0.0},
    "12 epochs": {"num_train_epochs": 12.0},
}


def glue(
    model: str,
    folder: str | None = None,
    config: str = str(CONFIGS / "glue.yaml"),
    tasks: tuple[str, ...] = ("rte", "mrpc", "stsb", "cola", "sst2"),
    mechanisms: tuple[str, ...] = tuple(MECHANISMS),
    variants: tuple[str, ...] = ("distilled", "no distillation"),
    seeds: tuple[int, ...] = (0,),
    work: str | None = None,
) -> Cells:
    """What conversion costs on GLUE, mechanism by mechanism, beside the softmax control through the same steps.

    For every task and seed the exact model is fine-tuned once. From it every mechanism is converted (attention
    transfer, then distillation), and once more without distillation (attention transfer, then the task's own loss); the
    control goes through the same training with exact attention. Needs the train extra.

    Args:
        model: The pretrained encoder.
        folder: Folder with the GLUE files; by default the Hub.
        config: YAML file with the options of the conversion.
        tasks: Names of tasks.
        mechanisms: Rows of the table, or names of mechanisms.
        variants: distilled, no distillation, 12 epochs (of distillation).
        seeds: Of data, training and random features.
        work: Folder for the trained models, from which `--resume` goes on within a conversion; by default they go.
    """
    options = read_options(config)
    base = {**options, "teacher": {"num_train_epochs": 0.0}}
    with nullcontext(work) if work else tempfile.TemporaryDirectory() as trained:
        for seed, task, variant, mechanism in product(seeds, tasks, variants, (None, *mechanisms)):
            data = {**options["data"], "task": task, "folder": folder}
            settings = {"model": model, "data": data, "seed": seed}
            exact = partial(finetuned, options, "teacher", output=Path(trained, f"{task}-{seed}"), **settings)
            row = {"attention": mechanism, **MECHANISMS.get(str(mechanism), {})}
            changed = {**base, **row, "seed": seed}
            changed["distill"] = {**base["distill"], **VARIANTS[variant]}
            facts = {"model": Path(model).name, "task": task, "seed": seed}
            facts |= {"mechanism": mechanism or CONTROL, "variant": variant}
            output = Path(trained, "-".join(map(str, facts.values())).replace(" ", "-"))
            call = partial(_converted, exact, {**changed, "data": data}, output)
            yield Cell(facts, call, {**changed, "teacher": options["teacher"]})


def _converted(exact: Callable[[], Path], options: Options, output: Path) -> Rows:
    """Convert the fine-tuned model, and keep the numbers only."""
    model, began = str(exact()), time.perf_counter()
    result = hla.convert(**options | {"model": model, "output": str(output), "resume": output.exists()})
    shutil.rmtree(output)
    stages = {name: values for name, values in asdict(result.scores).items() if values is not None}
    seconds = round(time.perf_counter() - began, 1)
    facts = {"learned_parameters": result.model.learned_parameters, "data": result.data}
    return [{"metric": result.score.metric, **stages, "seconds": seconds, **facts}]


# --------------------------------------------------------------------------------------------------------------------
# Fidelity


def fidelity(
    model: str | None = None,
    dataset: str | None = None,
    attention: tuple[str, ...] | None = None,
    steps: int = 100,
    seed: int = 0,
) -> Cells:
    """How near every mechanism with default options is to softmax, before and after attention transfer.

    KL of the attention weights, relative error of the outputs, cosine of the final hidden states, and perplexity
    (decoders) or agreement of sentence embeddings (encoders). On two cores a mechanism takes one to three minutes.
    Needs the demo extra.

    Args:
        model: Folder or Hub name; by default the encoder of the demo.
        dataset: Text file; by default the documentation of the standard library.
        attention: Names of mechanisms; by default all of the model's direction.
        steps: Steps of attention transfer.
        seed: Of data, training and random features.
    """
    source, name = resolve_model(model)
    decoder = task_type_of(AutoConfig.from_pretrained(source), None, DataConfig()) == "causal-lm"
    options = {"data": dataset or PYTHON_DOCUMENTATION, "steps": steps, "seeds": (seed,), "name": name}
    for mechanism in workloads.mechanism_names(attention, decoder):
        facts = {"model": Path(name).name, "attention": mechanism}
        call = partial(_fidelity, source, {**options, "attention": (mechanism,)}, decoder)
        yield Cell(facts, call, {"steps": steps, "seed": seed, "dataset": Path(dataset or PYTHON_DOCUMENTATION).name})


def _fidelity(source: str, options: Options, decoder: bool) -> Rows:
    table = hla.evaluate(source, timing=False, **options).table
    table = table[table["state"].isin(["untrained", "transferred"])]
    task = {"perplexity": "perplexity"} if decoder else {"cosine": "sentence_cosine"}
    names = {"kl": "kl", "output_error": "output_error", "final_cosine": "final_cosine", **task}
    rows: Rows = []
    for state, group in table.groupby("state", sort=False):
        values = group[[*names]].mean()
        row = {new: None if pd.isna(values[name]) else float(values[name]) for name, new in names.items()}
        rows.append({"state": "trained" if state == "transferred" else state, **row})
    return rows


# --------------------------------------------------------------------------------------------------------------------
# The linear part of windows in decoders

#: Rows of the calibration.
CALIBRATION_ROWS = 4

#: What lies outside of the window: the options, and whether it is calibrated.
OUTSIDE: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({"mix_init": CLOSED_MIX}, False),
    "hedgehog": ({"feature_map": "hedgehog"}, False),
    "vq, calibrated": ({"feature_map": "vq"}, True),
}


def linear_part(
    model: str,
    dataset: str,
    texts: tuple[str, ...],
    windows: tuple[int, ...] = (64, 128, 384),
    length: int = 2048,
    rows: int = 4,
    outside: tuple[str, ...] = tuple(OUTSIDE),
) -> Cells:
    """What the part outside of windows is worth in a decoder without any training, on several texts.

    The loss of the next token over the second half of each row. On two cores SmolLM2-135M takes some ten minutes for a
    window and 2,048 tokens.

    Args:
        model: A decoder: folder, GGUF file or Hub name.
        dataset: Text file that is calibrated on.
        texts: Text files that are measured on.
        windows: Widths of the window in tokens.
        length: Tokens of a row.
        rows: Rows of each text.
        outside: What to put outside of the window.
    """
    unknown = [name for name in outside if name not in OUTSIDE]
    if unknown:
        raise ValueError(f"outside: {unknown[0]!r} is none of {', '.join(OUTSIDE)}.")
    exact = load_checkpoint(model, AutoModelForCausalLM, dtype=torch.float32)[0].eval()
    tokenizer = load_tokenizer(TrainingRunConfig(model=model))
    facts, names = {"model": Path(model).name}, [Path(path).name for path in texts]
    settings = {"length": length, "rows": rows, "calibrated on": Path(dataset).name, "texts": names}

    @cache
    def rows_of(path: str, count: int) -> list[list[int]]:
        documents = text_documents(Path(path), "auto")
        return packed_rows(tokenizer, documents, length)[:count]

    def losses(window: int | None, name: str) -> Rows:
        patched = exact
        if window is not None:
            options, calibrated = OUTSIDE[name]
            patched = hla.patch_model(shared_copy(exact), "window", window_size=window, **options)
            if calibrated:
                ids = torch.tensor(rows_of(dataset, CALIBRATION_ROWS))
                hla.calibrate(patched, [{"input_ids": row[None]} for row in ids])
        measured = []
        for path in texts:
            values = TokenLoss(strided_windows(rows_of(path, rows), length, length // 2), positions=8)(patched)
            by_position = [value for name, value in values.items() if name.startswith("loss_at_")]
            measured.append({"text": Path(path).name, "loss": fmean(by_position[4:]), "loss_all": values["loss"]})
        return measured

    for window, name in [(None, "exact"), *product(windows, outside)]:
        yield Cell({**facts, "window": window, "outside": name}, partial(losses, window, name), settings)


# --------------------------------------------------------------------------------------------------------------------
# The start of windows in encoders

#: What lies outside of the window of an encoder: the options, and whether it is calibrated.
ENCODER_OUTSIDE: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({"mix_init": CLOSED_MIX}, False),
    "hedgehog": ({"feature_map": "hedgehog", "mix_init": 0.0}, False),
    "hedgehog, calibrated": ({"feature_map": "hedgehog", "mix_init": 0.0}, True),
}
for _codes in (32, 64, 128, 256):
    _options = {"feature_map": "vq", "feature_map_options": {"num_features": _codes}}
    ENCODER_OUTSIDE[f"{_codes} codes, calibrated"] = (_options, True)


#: Steps that tell what a step of an attention transfer takes.
TIMED_STEPS = 4


def encoder_start(
    model: str,
    dataset: str,
    texts: tuple[str, ...],
    lengths: tuple[int, ...] = (128, 256, 512, 2048),
    outside: tuple[str, ...] = tuple(ENCODER_OUTSIDE),
    tokens: int = 8192,
    passages: int = 64,
    seconds: tuple[float, ...] = (0.0,),
    batch_tokens: int = 2048,
    seeds: tuple[int, ...] = (0, 1, 2),
) -> Cells:
    """How near a sentence encoder is to the exact one with windows of 64 tokens, by what lies outside of them.

    The cosine of the mean-pooled embeddings, and the share of passages with the same nearest neighbour, on several
    texts: as patched, calibrated, and after an attention transfer that takes, with the calibration, so many seconds of
    a processor. Positions are extended by repetition where a length needs it.

    Args:
        model: A sentence encoder with mean pooling: folder or Hub name.
        dataset: Text file that is calibrated and trained on.
        texts: Text files that are measured on.
        lengths: Tokens of a passage.
        outside: What to put outside of the window.
        tokens: Tokens of the calibration.
        passages: Passages of each text.
        seconds: Seconds of processor time for calibration and attention transfer; 0: calibrated only.
        batch_tokens: Tokens of a batch.
        seeds: Each takes other passages for calibration and training.
    """
    unknown = [name for name in outside if name not in ENCODER_OUTSIDE]
    if unknown:
        raise ValueError(f"outside: {unknown[0]!r} is none of {', '.join(ENCODER_OUTSIDE)}.")
    source, name = resolve_model(model)
    exact: Any = load_checkpoint(source, AutoModel, dtype=torch.float32)[0].eval()
    tokenizer = load_tokenizer(TrainingRunConfig(model=source))
    pad, positions = pad_token(tokenizer), exact.config.max_position_embeddings

    @cache
    def extended(length: int) -> Any:
        return exact if length <= positions else hla.extend_positions(shared_copy(exact), length)

    @cache
    def passages_of(path: str, length: int) -> list[list[int]]:
        return text_rows(tokenizer, text_documents(Path(path), "auto"), length, causal=False)

    def training_rows(length: int, seed: int) -> list[list[int]]:
        rows = [row for row in passages_of(dataset, length) if len(row) == length]
        random.Random(f"encoder start {seed}").shuffle(rows)
        return rows

    @cache
    def measure_of(path: str, length: int) -> EmbeddingCosine:
        rows = evenly_spread([row for row in passages_of(path, length) if len(row) == length], passages)
        batches = padded_batches(rows, max(1, batch_tokens // length), pad)
        return EmbeddingCosine(batches, sentence_embeddings(extended(length), batches))

    def measured(length: int, name: str, seed: int, budget: float) -> Rows:
        options, calibrated = ENCODER_OUTSIDE[name]
        student = hla.patch_model(shared_copy(extended(length)), "window", **options)
        batches = padded_batches(training_rows(length, seed), max(1, batch_tokens // length), pad)
        began = time.process_time()
        if calibrated:
            hla.calibrate(student, batches[: -(-tokens // batch_tokens)], max_length=length)
        cost = {"calibration": time.process_time() - began, "steps": 0}
        if budget:
            trial, began = copy.deepcopy(student), time.process_time()
            hla.transfer_attention(trial, batches, max_steps=TIMED_STEPS)
            step = (time.process_time() - began) / TIMED_STEPS
            cost["steps"] = max(1, round((budget - cost["calibration"]) / step))
            hla.transfer_attention(student, batches, max_steps=cost["steps"])
        measures = {Path(path).name: measure_of(path, length) for path in texts}
        return [{"text": text, **measure(student), **cost} for text, measure in measures.items()]

    settings = {"passages": passages, "batch_tokens": batch_tokens, "texts": [Path(path).name for path in texts]}
    settings |= {"calibrated on": Path(dataset).name, "tokens": tokens}
    for length, budget, seed, name_outside in product(lengths, seconds, seeds, outside):
        calibrated = ENCODER_OUTSIDE[name_outside][1]
        if calibrated or (seed == seeds[0] and not budget):  # the others learn nothing, and the seed changes nothing
            facts = {"model": Path(name).name, "length": length, "seconds": budget, "outside": name_outside}
            yield Cell({**facts, "seed": seed}, partial(measured, length, name_outside, seed, budget), settings)
