"""What length is worth and costs, on proteins.

Is there a segment of a protein in a membrane? A small ESM encoder (rotary positions, a token a residue) is trained from
random weights. The csv file has the columns `sequence`, `membrane` (0 or 1) and `partition` (homologous proteins share
one); the last two partitions are held out.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EsmTokenizer,
)

import hf_linear_attn as hla
from hf_linear_attn.data.text import padded_batches
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.memory import peak_memory
from hf_linear_attn.utils.models import shared_copy
from hf_linear_attn.utils.timing import sample_interleaved

from .conversion import CONFIGS, Options, finetuned, read_options
from .runner import Cell, Cells, Rows
from .workloads import ratio, spread

EXACT = "softmax"
CPU = torch.device("cpu")
#: ESM's tokens: one a residue, with the special ones in their positions.
VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
TEST_PARTITIONS = 2
#: Proteins of more residues are long.
LONG = 1024
#: Name -> inputs longer than the first and not longer than the second number.
STRATA = {"<= 1,024": (0, 1024), "> 1,024": (1024, np.inf), "> 2,048": (2048, np.inf)}
#: A segment in a membrane has some 20 residues. Local: exact attention to the neighbours, and nothing else.
WINDOW = {"attention": "window", "window_size": 16}
LOCAL = {**WINDOW, "mix_init": CLOSED_MIX}
#: What is compared: name -> layers as `patch_model` takes them; None: exact attention.
VARIANTS: dict[str, dict[str, Any] | None] = {
    EXACT: None,
    "local + softmax": {"default": EXACT, "0": LOCAL, "1": LOCAL},
    "window": {"default": WINDOW},
    "local + hedgehog": {"default": "hedgehog", "0": LOCAL, "1": LOCAL},
    "local + luna": {"default": {"attention": "luna", "num_packed": 16}, "0": LOCAL, "1": LOCAL},
    **{name: {"default": name} for name in ("elu", "hedgehog")},
}
#: Inputs of one forward pass when they are scored.
SCORED_AT_ONCE = 4


def proteins(
    source: str,
    work: str,
    config: str = str(CONFIGS / "proteins.yaml"),
    variants: tuple[str, ...] = tuple(VARIANTS),
    lengths: tuple[int, ...] = (512, 1024, 4096),
    pieces: tuple[str, ...] = (EXACT, "local + softmax"),
    scored: int = 1000,
    seeds: tuple[int, ...] = (0,),
    steps: int | None = None,
) -> Cells:
    """What length is worth: models trained and scored on proteins that are cut to several lengths.

    For each seed and variant a model is trained on short proteins (stage `teacher` of the options). It goes through the
    same further steps (`distill`, the task's loss alone) at each length. Held-out proteins are scored once, after the
    last step: nothing is chosen by them. Needs the train extra.

    Args:
        source: The csv file.
        work: Folder for data and checkpoints; proteins-costs reads it.
        config: YAML file with the options of the conversion.
        variants: Names in VARIANTS.
        lengths: Tokens that inputs are cut to.
        pieces: Variants whose model of the shortest length also scores whole proteins, in pieces, by the largest score.
        scored: Held-out proteins of up to 1,024 residues to score, beside all longer ones.
        seeds: Of training and random features.
        steps: Those at each length, if not the options' own.
    """
    base, folder = read_options(config), Path(work)
    base["distill"]["max_steps"] = steps or base["distill"]["max_steps"]
    if not (folder / "scored.csv").exists():
        write_proteins(Path(source), folder, base["data"]["max_length"] - 2, scored)
    jobs = [(name, length, False) for length, name in product(lengths, variants)]
    jobs += [(name, min(lengths), True) for name in pieces]
    for seed in seeds:
        options = {**base, "seed": seed}
        for name, length, in_pieces in jobs:
            facts = {"variant": name, "length": length, "steps": base["distill"]["max_steps"], "seed": seed}
            call = partial(_trained_and_scored, options, name, folder, length, in_pieces)
            yield Cell({**facts, "pieces": in_pieces}, call, options)


def write_proteins(source: Path, folder: Path, short_length: int, scored: int) -> None:
    """Write the files of a run.

    Short: whole proteins of the training partitions. Long: all beyond 1,024 residues and as many others. Scored: all
    held-out proteins beyond 1,024 residues, and `scored` others. A validation split must exist: it decides nothing.
    """
    table = pd.read_csv(source)
    order = [*range(len(table))]
    random.Random(0).shuffle(order)
    table["label"] = table["membrane"].astype(bool).map({True: "membrane", False: "soluble"})
    table["length"] = table["sequence"].str.len()
    table = table.rename(columns={"sequence": "text"}).iloc[order]
    is_test = table["partition"].isin(sorted(table["partition"].unique())[-TEST_PARTITIONS:])
    is_long, table = table["length"] > LONG, table[["text", "label", "length"]]
    long = table[is_long & ~is_test]
    test = pd.concat([table[~is_long & is_test][:scored], table[is_long & is_test]])
    parts = {
        "short": table[~is_test & (table["length"] <= short_length)],
        "long": pd.concat([long, table[~is_long & ~is_test][: len(long)]]),
    }
    for name, train in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        train.to_csv(folder / name / "train.csv", index=False)
        pd.concat([test[:8], test[-8:]]).to_csv(folder / name / "validation.csv", index=False)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    test.sort_values("length", kind="stable").to_csv(folder / "scored.csv", index=False)  # for little padding


def _trained_and_scored(options: Options, name: str, folder: Path, length: int, in_pieces: bool) -> Rows:
    """Train at a length, unless that model is there already, and score."""
    seed_folder = folder / f"seed{options['seed']}"
    layers = VARIANTS[name]
    slug = name.replace(" + ", "-")
    plan, out, data = None, seed_folder / f"{slug}-{length}", options["data"]
    if layers is not None:
        plan = str(seed_folder / f"{slug}-plan.json")
        write_json(Path(plan), layers)
    first: Options = {"tokenizer": str(folder / "tokenizer"), "plan": plan}
    first["data"] = {**data, "dataset": str(folder / "short")}
    short = finetuned(options, "teacher", output=seed_folder / f"{slug}-short", **first)
    then: Options = {"model": str(short), "model_type": None, "config_overrides": {}, "max_length": length}
    then["data"] = {**data, "dataset": str(folder / "long"), "max_length": length}
    path = finetuned(options, "distill", output=out, **then)
    model = hla.load_pretrained(str(path)) if layers else AutoModelForSequenceClassification.from_pretrained(path)
    result = ConversionResult.load(out / "results.json")
    assert result.training.train is not None  # this is a fine-tuning
    tokens, facts = result.training.train["tokens"], result.data
    training = {"tokens": tokens, "truncated": facts["train_truncated"], "training_rows": facts["train_rows"]}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    strata = score(model.eval(), folder, length, in_pieces, options["bf16"])
    return [{"layers": layers, "strata": strata, "training": training, "parameters": parameters}]


def score(model: Any, folder: Path, length: int, in_pieces: bool, bf16: bool) -> dict[str, Any]:
    """Return the metrics of each stratum.

    The score of a protein is the largest of its pieces: one segment is enough for "membrane", which comes first by its
    name.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = pd.read_csv(folder / "scored.csv")
    labels = (rows["label"] == model.config.id2label[0]).to_numpy()
    encode = encode_pieces if in_pieces else encode_cut
    pieces = [encode(tokenizer, text, length) for text in rows["text"]]
    margins, strata = [], {}
    for batch in padded_batches([*chain.from_iterable(pieces)], SCORED_AT_ONCE, tokenizer.pad_token_id):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(**batch).logits.float()
        margins.append(logits[:, 0] - logits[:, 1])
    scores = np.maximum.reduceat(torch.cat(margins).numpy(), np.cumsum([0, *map(len, pieces)])[:-1])
    for name, (low, high) in STRATA.items():
        chosen = rows["length"].between(low, high, inclusive="right").to_numpy()
        if len({*labels[chosen]}) == 2:
            strata[name] = classification_metrics(scores[chosen], labels[chosen])
    return strata


def encode_cut(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Return the beginning of a text, as the only piece."""
    return [tokenizer(text, truncation=True, max_length=length, verbose=False)["input_ids"]]


def encode_pieces(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Return the whole text in pieces of a length that overlap by a quarter."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first, *_, last = tokenizer("", verbose=False)["input_ids"]
    capacity = length - 2
    starts = range(0, max(len(ids) - capacity // 4, 1), capacity - capacity // 4)
    return [[first, *ids[start : start + capacity], last] for start in starts]


def classification_metrics(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return accuracy, Matthews correlation with the standard error of its bootstrap, area under the ROC curve."""
    from scipy.stats import bootstrap
    from sklearn.metrics import matthews_corrcoef, roc_auc_score

    predicted = scores > 0
    options: dict[str, Any] = {"paired": True, "vectorized": False, "n_resamples": 1000, "method": "percentile"}
    drawn = bootstrap((predicted, labels), matthews_corrcoef, **options, rng=np.random.default_rng(0))
    return {
        "rows": len(labels),
        "accuracy": float((predicted == labels).mean()),
        "mcc": float(matthews_corrcoef(labels, predicted)),
        "mcc_error": float(drawn.standard_error),
        "auc": float(roc_auc_score(labels, scores)),
    }


# --------------------------------------------------------------------------------------------------------------------
# Costs


def costs(
    work: str,
    config: str = str(CONFIGS / "proteins.yaml"),
    lengths: tuple[int, ...] = (512, 1024, 4096),
    inputs: int = 12,
    rounds: int = 3,
) -> Cells:
    """What a long input costs: seconds and memory of training and of inference, of all variants in turns.

    A sample of the held-out proteins beyond 1,024 residues is cut to each length and goes through the model one by one
    (no padding). The seconds are for 1,000 inputs. Attention weights have no dropout here: linear attention has none,
    and exact attention on a CPU would need the whole matrix for it. Memory: what a forward and backward pass of the
    longest input, cut to the length, adds to the resident set at its peak.

    Args:
        work: The folder of proteins: its short exact model and its held-out inputs are used.
        config: YAML file with the options of the conversion.
        lengths: Tokens that inputs are cut to.
        inputs: Number of proteins.
        rounds: Rounds of timing.
    """
    folder, bf16 = Path(work), read_options(config)["bf16"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = pd.read_csv(folder / "scored.csv")
    texts = [*rows[rows["length"] > LONG]["text"]]
    random.Random(0).shuffle(texts)
    path = folder / "seed0" / f"{EXACT}-short" / "model"
    exact = AutoModelForSequenceClassification.from_pretrained(path, attention_probs_dropout_prob=0.0)
    models = {
        name: exact if layers is None else hla.patch_model(shared_copy(exact), layers)
        for name, layers in VARIANTS.items()
    }
    for length in lengths:
        ids = [encode_cut(tokenizer, text, length)[0] for text in texts]
        call = partial(_costs, models, ids[:inputs], max(ids, key=len), rounds, bf16)
        yield Cell({"length": length}, call, {"inputs": inputs, "rounds": rounds, "bf16": bf16})


def _costs(models: Mapping[str, Any], inputs: Any, longest: list[int], rounds: int, bf16: bool) -> Rows:
    rows: dict[str, dict[str, Any]] = {name: {"variant": name} for name in models}
    counts: dict[str, int] = {"min_rounds": rounds, "max_rounds": rounds}
    for kind, backward in (("inference", False), ("training", True)):
        calls = {name: _passes(model, inputs, bf16, backward) for name, model in models.items()}
        samples = sample_interleaved(calls, seconds=0.0, repeat=False, **counts, clock=time.process_time)
        for name, seconds in samples.items():
            per_1000 = spread([1000 * value / len(inputs) for value in seconds])
            speedup = ratio(samples[EXACT], seconds)["median"]
            rows[name][kind] = {"seconds_per_1000": per_1000["median"], **per_1000, "speedup": speedup}
    for name, model in models.items():
        rows[name]["peak_bytes"] = peak_memory(_passes(model, [longest], bf16, True), CPU)
    return list(rows.values())


def _passes(model: Any, inputs: Sequence[list[int]], bf16: bool, backward: bool) -> Callable[[], None]:
    """All inputs through the model, one by one."""

    def run() -> None:
        model.train(backward)
        for ids in inputs:
            tokens = torch.tensor([ids])
            with torch.set_grad_enabled(backward), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
            if backward:
                logits.float().square().sum().backward()
                model.zero_grad()

    return run
