"""What torch.compile gains in decoding: the time of a token of `generate`, eager and compiled, exact and linear.

    python -m recipes.benchmarks.compiled_decoding

Needs the package and a C++ compiler. Decoders with random weights, batch 1, one thread, float32. Eager models have the
default cache; compiled ones the static cache, whose layers are recurrent states where attention is linear. A sample is
the time of `--tokens` more tokens after a prompt (of static caches as much longer too), divided by their number; all
models take turns. Use a quiet machine.
Writes recipes/results/compiled-decoding.json; two minutes for the small model, a quarter of an hour for both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from rich.console import Console
from transformers import PreTrainedModel

from hf_linear_attn import patch_model
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.models import shared_copy
from recipes.benchmarks.shapes import gpt2_small, small_decoder
from recipes.benchmarks.timing import spread

#: Models by name, and the rounds that each is measured in.
MODELS: dict[str, tuple[Callable[[int], PreTrainedModel], int]] = {
    "4 layers of 4×64": (small_decoder(4, 256, 4, 4096), 9),
    "GPT-2 small": (gpt2_small, 5),
}
MECHANISMS = ("elu", "favor+", "hedgehog", "window")
#: Tokens of the shorter of the two calls whose difference is a sample.
FEW = 2

RESULTS = Path(__file__).resolve().parents[1] / "results"


def variants(exact: PreTrainedModel) -> dict[tuple[str, bool], PreTrainedModel]:
    """Eager and compiled models by attention."""
    models = {}
    for name in ("sdpa", *MECHANISMS):
        for compiled in (False, True):
            model = shared_copy(exact)
            if name != "sdpa":
                patch_model(model, name)
            if compiled:
                model.forward = torch.compile(model.forward)
            models[name, compiled] = model
    return models


def seconds_a_token(model: PreTrainedModel, compiled: bool, prompt: torch.Tensor, tokens: int) -> float:
    cache = {"cache_implementation": "static"} if compiled else {}
    times = []
    for count in (FEW + tokens, FEW):
        began = time.perf_counter()
        generate: Any = model.generate
        generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **cache)
        times.append(time.perf_counter() - began)
    return (times[0] - times[1]) / tokens


def measure(name: str, contexts: list[int], tokens: int, console: Console) -> list[dict[str, Any]]:
    build, rounds = MODELS[name]
    torch.manual_seed(0)
    models = variants(build(max(contexts) + FEW + tokens).eval())
    rows = []
    for context in contexts:
        prompt = torch.full((1, context), 7)
        samples: dict[tuple[str, bool], list[float]] = {kind: [] for kind in models}
        for (attention, compiled), model in models.items():
            began = time.perf_counter()
            seconds_a_token(model, compiled, prompt, tokens)
            setting = f"{name}, {attention}{', compiled' if compiled else ''}, {context:,} tokens"
            console.print(f"{setting}: {time.perf_counter() - began:.0f} s to begin with")
        for _ in range(rounds):
            for (attention, compiled), model in models.items():
                samples[attention, compiled].append(seconds_a_token(model, compiled, prompt, tokens))
        for (attention, compiled), seconds in samples.items():
            rows.append(
                {"model": name, "attention": attention, "compiled": compiled, "context": context, **spread(seconds)}
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 960])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled-decoding.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100  # of one piece of code of Transformers, which all models here share
    console = Console()
    machine = environment(torch.device("cpu"))
    rows = [row for name in arguments.models for row in measure(name, arguments.contexts, arguments.tokens, console)]
    settings = {"contexts": arguments.contexts, "tokens": arguments.tokens, "threads": 1}
    write_json(arguments.out, {"format_version": 1, "settings": settings, "environment": machine, "rows": rows})
    console.print(f"Written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
