"""What a long input costs, with exact and with linear attention: seconds and memory of training and of inference.

    python -m recipes.benchmarks.long_costs proteins --work WORK
    python -m recipes.benchmarks.long_costs reviews --work WORK --lengths 512 2048 4096

Needs the folder that `long_table.py` left: its short model and its held-out inputs. A sample of those that are long by
their own measure is cut to each length and goes through the model one by one (no padding), forward, and forward and
backward; all variants in turns, in one run. Seconds are processor time of the process, so that others on the machine
disturb little; medians over rounds, for 1,000 inputs. Attention weights have no dropout here: linear attention has
none, and exact attention on a CPU would hold the whole matrix for it. Memory: what one forward and backward pass adds
to the resident set at its peak, for the longest input cut to the length. At last the longest input as a whole, once.
`--out` is written after each length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.integration.positions import position_limit
from hf_linear_attn.measure.memory import peak_memory
from hf_linear_attn.training.options import ConvertConfig
from hf_linear_attn.utils.arguments import parse_config
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.models import shared_copy

from .long_data import read_scored
from .long_table import EXACT, PARTS, Part

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
#: Inputs beyond so many tokens are drawn from.
LONG = {"proteins": 1024, "reviews": 512}
LENGTHS = {"proteins": (512, 1024, 4096), "reviews": (512, 2048, 4096)}
CPU = torch.device("cpu")


def variants(exact: Any, part: Part, longest: int) -> dict[str, Any]:
    """The model with each variant of its layers, weights shared, for inputs of any length asked for."""
    limit = position_limit(exact)
    if limit is not None and limit < longest:
        hla.extend_positions(exact, longest)
    return {
        name: exact if layers is None else hla.patch_model(shared_copy(exact), layers)
        for name, layers in part.variants.items()
    }


def one_pass(model: Any, inputs: Sequence[list[int]], bf16: bool, backward: bool) -> Callable[[], None]:
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


def sample_interleaved(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each call in each round; every round begins with another one."""
    names = list(calls)
    for call in calls.values():  # to warm up
        call()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.process_time()
            calls[name]()
            samples[name].append(time.process_time() - began)
    return samples


def at_length(models: dict[str, Any], inputs: list[list[int]], longest: list[int], rounds: int, bf16: bool) -> Any:
    """Costs of every mechanism on inputs that are cut already; `longest` for the memory."""
    costs: dict[str, Any] = {name: {} for name in models}
    for kind, backward in (("inference", False), ("training", True)):
        calls = {name: one_pass(model, inputs, bf16, backward) for name, model in models.items()}
        samples = sample_interleaved(calls, rounds)
        for name, seconds in samples.items():
            each = [1000 * value / len(inputs) for value in seconds]
            ratios = [exact / own for exact, own in zip(samples[EXACT], seconds, strict=True)]
            costs[name][kind] = {
                "seconds_per_1000": statistics.median(each),
                "least": min(each),
                "most": max(each),
                "speedup": statistics.median(ratios),
            }
    for name, model in models.items():
        costs[name]["peak_bytes"] = peak_memory(one_pass(model, [longest], bf16, True), CPU)
    return costs


def whole(models: dict[str, Any], ids: list[int], bf16: bool) -> dict[str, Any]:
    """The longest input, uncut, once a variant; the memory is that of the pass that is timed."""
    costs: dict[str, Any] = {"tokens": len(ids), "inference": {}, "training": {}, "peak_bytes": {}}
    for name, model in models.items():
        for kind, backward in (("inference", False), ("training", True)):
            began = time.process_time()
            costs["peak_bytes"][name] = peak_memory(one_pass(model, [ids], bf16, backward), CPU)
            costs[kind][name] = time.process_time() - began
    return costs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(LONG))
    parser.add_argument("--work", type=Path, required=True, help="the folder of long_table.py")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--inputs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: recipes/results/long/PART-costs.json")
    arguments = parser.parse_args(argv)
    folder = arguments.work / arguments.part
    lengths = arguments.lengths or LENGTHS[arguments.part]
    out = arguments.out or RESULTS / "long" / f"{arguments.part}-costs.json"
    config = str(HERE / "configs" / f"long-table-{arguments.part}.yaml")
    base = parse_config(ConvertConfig, ["--config", config], program="long_costs")
    rows = read_long(folder, LONG[arguments.part])
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    drawn = [tokenizer(row, verbose=False)["input_ids"] for row in rows[: arguments.inputs]]
    longest = max((tokenizer(row, verbose=False)["input_ids"] for row in rows), key=len)
    short = folder / "seed0" / f"{EXACT}-short" / "model"
    exact = AutoModelForSequenceClassification.from_pretrained(short, attention_probs_dropout_prob=0.0)
    models = variants(exact, PARTS[arguments.part], max(*lengths, len(longest)))
    bf16 = base.bf16
    report: dict[str, Any] = {
        "format_version": 1,
        "part": arguments.part,
        "settings": {
            "beyond": LONG[arguments.part],
            "inputs": len(drawn),
            "mean_tokens": statistics.mean(map(len, drawn)),
            "rounds": arguments.rounds,
            "variants": PARTS[arguments.part].variants,
            "precision": "bf16" if bf16 else "no",
        },
        "parameters": sum(parameter.numel() for parameter in exact.parameters()),
        "environment": environment(CPU),
        "lengths": {},
    }
    for length in lengths:
        cut = [ids[: length - 1] + ids[-1:] if len(ids) > length else ids for ids in drawn]
        report["lengths"][str(length)] = at_length(models, cut, longest[:length], arguments.rounds, bf16)
        Console(stderr=True).print(length, report["lengths"][str(length)])
        write_json(out, report)
    report["longest"] = whole(models, longest, bf16)
    write_json(out, report)
    return 0


def read_long(folder: Path, beyond: int) -> list[str]:
    """Held-out texts that are longer, in a drawn order."""
    texts = [row["text"] for row in read_scored(folder) if int(row["length"]) > beyond]
    random.Random(0).shuffle(texts)
    return texts


if __name__ == "__main__":
    sys.exit(main())
