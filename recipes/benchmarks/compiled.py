"""What torch.compile gains: a forward pass and a decoding step, eager and compiled, exact and linear.

    python -m recipes.benchmarks.compiled

Needs the package and a C++ compiler. Models with random weights, batch 1, one thread. A forward pass is that of a
prompt; the time of a token is that of `--tokens` more tokens of `generate` after a prompt, divided by their number.
Eager models decode with the default cache, compiled ones with the static cache, whose layers are recurrent states where
attention is linear. All variants of a model take turns, and ratios are those of each round. Use a quiet machine.
Writes recipes/results/compiled.json; three quarters of an hour, most of which torch.compile takes.
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
from recipes.benchmarks.shapes import bert_base, gpt2_small, smollm2
from recipes.benchmarks.timing import ratio, spread

MODELS = {"BERT-base": bert_base, "GPT-2 small": gpt2_small, "SmolLM2-135M": smollm2}
ATTENTIONS = ("sdpa", "hedgehog", "window")
#: Tokens of the shorter of the two calls whose difference is a sample.
FEW = 2

RESULTS = Path(__file__).resolve().parents[1] / "results"

Sample = Callable[[PreTrainedModel, bool], float]


def variants(exact: PreTrainedModel, attentions: list[str]) -> dict[tuple[str, bool], PreTrainedModel]:
    """Eager and compiled models by attention."""
    models = {}
    for name in attentions:
        for compiled in (False, True):
            model = shared_copy(exact)
            if name != "sdpa":
                patch_model(model, name)
            if compiled:
                model.forward = torch.compile(model.forward)
            models[name, compiled] = model
    return models


def forward_pass(length: int) -> Sample:
    ids = torch.full((1, length), 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # A decoder without a mask traces a full one.

    @torch.no_grad()
    def seconds(model: PreTrainedModel, compiled: bool) -> float:
        extra = {"use_cache": False, "logits_to_keep": 1} if model.can_generate() else {}
        began = time.perf_counter()
        model(**inputs, **extra)
        return time.perf_counter() - began

    return seconds


def one_token(context: int, tokens: int) -> Sample:
    prompt = torch.full((1, context), 7)

    def seconds(model: PreTrainedModel, compiled: bool) -> float:
        cache = {"cache_implementation": "static"} if compiled else {}
        times = []
        for count in (FEW + tokens, FEW):
            began = time.perf_counter()
            generate: Any = model.generate
            generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **cache)
            times.append(time.perf_counter() - began)
        return (times[0] - times[1]) / tokens

    return seconds


def measure(name: str, dtype: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name](options.length + FEW + options.tokens).to(getattr(torch, dtype)).eval()
    models = variants(model, options.attentions)
    works = {"forward": forward_pass(options.length)}
    if model.can_generate():
        works["token"] = one_token(options.length, options.tokens)
    rows = []
    for work, sample in works.items():
        samples: dict[tuple[str, bool], list[float]] = {kind: [] for kind in models}
        for (attention, compiled), variant in models.items():  # A first call compiles, a second one warms up.
            began = time.perf_counter()
            sample(variant, compiled)
            sample(variant, compiled)
            setting = f"{name}, {dtype}, {work}, {attention}{', compiled' if compiled else ''}"
            console.print(f"{setting}: {time.perf_counter() - began:.0f} s to begin with")
        for _ in range(options.rounds):
            for (attention, compiled), variant in models.items():
                samples[attention, compiled].append(sample(variant, compiled))
        for attention in options.attentions:
            eager, compiled = samples[attention, False], samples[attention, True]
            row = {"model": name, "dtype": dtype, "attention": attention, "work": work}
            rows.append(
                {**row, "eager": spread(eager), "compiled": spread(compiled), "speedup": ratio(eager, compiled)}
            )
            console.print(rows[-1])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--attentions", nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--length", type=int, default=960, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100  # of one piece of code of Transformers, which all models here share
    console, machine, rows = Console(), environment(torch.device("cpu")), []
    settings = {name: getattr(options, name) for name in ("length", "tokens", "rounds")} | {"threads": 1}
    for name in options.models:
        for dtype in options.dtypes:
            rows += measure(name, dtype, options, console)
            write_json(options.out, {"format_version": 1, "settings": settings, "environment": machine, "rows": rows})
    console.print(f"Written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
