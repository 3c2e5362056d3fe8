"""What a step of attention transfer costs, in forward passes of the exact model.

    python -m recipes.benchmarks.transfer_cost

Models of the shapes of SmolLM2-135M and all-MiniLM-L6-v2, with random weights, and one row of tokens. Every mechanism
that learns takes a step (the exact forward pass that yields its inputs, its loss and its gradients) in turns with a
forward pass of the exact model by itself; the ratio is that of each round. Writes recipes/results/transfer-cost.json. A
quarter of an hour.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from hf_linear_attn import list_attentions, patch_model
from hf_linear_attn.measure.inputs import timing_options
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.training.transfer import AttentionTransferLoss
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.models import shared_copy
from recipes.benchmarks.shapes import minilm, smollm2
from recipes.benchmarks.timing import ratio, sample_interleaved, spread

MODELS = {"SmolLM2-135M": smollm2, "all-MiniLM-L6-v2": minilm}
RESULTS = Path(__file__).resolve().parents[1] / "results"


@torch.no_grad()
def forward(model: PreTrainedModel, batch: dict[str, Any]) -> None:
    model.base_model(**batch)


def measure(name: str, length: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = MODELS[name](length).eval()
    batch = {"input_ids": torch.randint(1000, 20000, (1, length))}
    direction = "causal" if model.can_generate() else "bidirectional"
    learned = [name for name, row in list_attentions().items() if row["learned"] and row[direction]]
    for attention in options.attentions or learned:
        sized = timing_options(ATTENTIONS.get(attention), {}, None, length)
        objective = AttentionTransferLoss(patch_model(shared_copy(model), attention, **sized))
        with objective.training():
            calls = {"forward": partial(forward, model, batch), "step": partial(objective, batch, 1)}
            samples = sample_interleaved(calls, seconds=options.seconds, slow=10.0)
        times = {kind: spread(values) for kind, values in samples.items()}
        cost = ratio(samples["step"], samples["forward"])
        yield {"model": name, "attention": attention, "length": length, **times, "forward_passes": cost}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--attentions", nargs="+", help="default: all that learn")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192], help="tokens of the row")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each call, in at least three rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "transfer-cost.json")
    options = parser.parse_args(argv)
    console, machine, rows = Console(), environment(torch.device("cpu")), []
    for name in options.models:
        for length in options.lengths:
            for row in measure(name, length, options):
                rows.append(row)
                facts = {"format_version": 1, "settings": {"batch_size": 1, "dtype": "float32"}, "environment": machine}
                write_json(options.out, {**facts, "rows": rows})
                cost = row["forward_passes"]["median"]
                console.print(f"{name}, {length:,} tokens, {row['attention']}: {cost:.2f} forward passes")
    console.print(f"Written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
