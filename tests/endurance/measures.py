"""What is measured, each at any size: rows with a value, its limit, and whether the value is within it."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS
from tests.comparing import logits, relative_error
from tests.inputs import token_ids
from tests.mechanisms.checks import build
from tests.small import patch_small, patched, small_options
from tests.tiny_models import BERT, GPT2, LLAMA, Family

ROOT = Path(__file__).resolve().parents[2]
SCALING = 0.25
HEADS, GROUPS, DIM = 2, 1, 16
CHUNK = 1024

Row = dict[str, Any]


def row(what: str, value: float, limit: float, unit: str, **more: Any) -> Row:
    return {"what": what, "value": value, "limit": limit, "unit": unit, "within_limit": value <= limit, **more}


# --------------------------------------------------------------------------------------------------------------------
# Drift


def stream(start: int, count: int) -> list[Tensor]:
    """Tokens `start` to `start + count` of an endless random stream: q, k, v in float64."""
    generator = torch.Generator().manual_seed(start + 1)
    sizes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM))
    return [torch.randn(1, heads, count, width, generator=generator, dtype=torch.float64) for heads, width in sizes]


@torch.no_grad()
def drift(name: str, dtype: torch.dtype, tokens: int) -> Row:
    """Error of a stream against the same in float64: at the end over near the beginning.

    Both get the same numbers, rounded to `dtype` first; values are N(0, 1), and errors are relative to them. (The
    outputs are averages of ever more values and shrink like 1/√L.) Compared are 99 % quantiles of 1,024 tokens, the
    worst of three: a single query that hardly any key answers, whose sums nearly vanish, is no drift. `largest_error`
    is over all tokens.
    """
    torch.manual_seed(0)
    options = small_options(ATTENTIONS.get(name).options)
    tested = build(name, True, HEADS, GROUPS, DIM, DIM, seed=0, limit=tokens, **options).to(dtype)
    exact = copy.deepcopy(tested).double()
    states: list[Any] = [None, None]
    errors, largest = [], 0.0
    for start in range(0, tokens, CHUNK):
        inputs = [x.to(dtype) for x in stream(start, CHUNK)]
        outs = []
        for index, module in enumerate((tested, exact)):
            qkv = inputs if module is tested else [x.double() for x in inputs]
            out, states[index] = module(
                AttentionInputs(*qkv, scaling=SCALING, causal=True, state=states[index], return_state=True)
            )
            outs.append(out.double())
        deviation = (outs[0] - outs[1]).abs().flatten()
        errors.append(float(deviation.quantile(0.99)))
        largest = max(largest, float(deviation.max()))
    first, last = max(errors[:3]), max(errors[-3:])
    growth = last / max(first, torch.finfo(dtype).eps)
    drift_row = row(f"drift of {name} in {str(dtype).removeprefix('torch.')}", growth, 2.0, "times", tokens=tokens)
    return {**drift_row, "error_at_the_beginning": first, "error_at_the_end": last, "largest_error": largest}


# --------------------------------------------------------------------------------------------------------------------
# Memory


def resident_bytes() -> int:
    """Bytes of this process that lie in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_count() -> int:
    gc.collect()
    with warnings.catch_warnings():  # some objects of torch warn when they are inspected
        warnings.simplefilter("ignore")
        return sum(isinstance(item, Tensor) for item in gc.get_objects())


def growth(what: str, step: Callable[[int], Any], count: int, warm: int) -> list[Row]:
    """Memory and tensors that `count` more steps leave behind, after `warm` ones.

    The least of up to three such spans: what leaks does so in each of them, while the allocator takes a few MiB from
    the system now and then, and keeps them.
    """
    numbers = itertools.count()

    def run_steps(steps: int) -> None:
        for number in itertools.islice(numbers, steps):
            step(number)

    run_steps(warm)
    limit, memory_growth, tensor_growth = 4.0, math.inf, math.inf
    for _ in range(3):
        memory, tensors = resident_bytes(), tensor_count()
        run_steps(count)
        memory_growth = min(memory_growth, (resident_bytes() - memory) / 2**20)
        tensor_growth = min(tensor_growth, tensor_count() - tensors)
        if memory_growth <= limit and tensor_growth <= 0:
            break
    return [
        row(f"{what}: memory growth", memory_growth, limit, "MiB", steps=count),
        row(f"{what}: tensors left", tensor_growth, 0, "tensors", steps=count),
    ]


@torch.no_grad()
def decoding(name: str, steps: int, warm: int = 200) -> list[Row]:
    """Token after token into one cache. GPT-2 has no positions for so many, Llama computes its own."""
    model = patched(name, LLAMA)
    cache: list[Any] = [None]

    def step(number: int) -> None:
        ids = torch.tensor([[2 + number % 50]])
        cache[0] = output_cache(model(ids, **cache_argument(model, cache[0]), use_cache=True))

    return growth(f"decoding with {name}", step, steps, warm)


def rounds(name: str, count: int, warm: int = 20) -> list[Row]:
    model = BERT.build()
    ids = token_ids()

    def step(number: int) -> None:
        patch_small(model, name)
        if number % 10 == 0:
            logits(model, ids)
        hla.unpatch_model(model)

    before = logits(model, ids)
    rows = growth(f"patching and unpatching with {name}", step, count, warm)
    same = float(not torch.equal(logits(model, ids), before))
    return [*rows, row(f"patching and unpatching with {name}: outputs changed", same, 0, "models", steps=count)]


# --------------------------------------------------------------------------------------------------------------------
# Reproducibility

CODE = """
import sys, hashlib, tempfile, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from tests.endurance.measures import trained_bytes
print(hashlib.sha256(trained_bytes(sys.argv[2], sys.argv[3] == "deterministic")).hexdigest())
"""


def trained_bytes(name: str, deterministic: bool = False) -> bytes:
    """Patch, train three steps, save, load, generate: all numbers that came out."""
    import tempfile

    torch.use_deterministic_algorithms(deterministic)
    torch.manual_seed(0)
    model = patch_small(LLAMA.build(), name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(3):
        ids = token_ids(seed=seed)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = hla.load_pretrained(folder)
    out = logits(model, token_ids(seed=9))
    assert torch.equal(logits(loaded, token_ids(seed=9)), out), "saving and loading changed the outputs"
    torch.manual_seed(1)
    tokens = loaded.generate(token_ids(1, 5), max_new_tokens=12, do_sample=True)
    torch.use_deterministic_algorithms(False)
    return out.numpy().tobytes() + tokens.numpy().tobytes()


def in_other_processes(name: str, processes: int = 2) -> Row:
    """Fresh processes, one of them with deterministic algorithms demanded, against this one."""
    expected = hashlib.sha256(trained_bytes(name)).hexdigest()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    different = 0
    for number in range(processes):
        mode = "deterministic" if number == 0 else "default"
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(ROOT), name, mode],
            env={**environment, "PYTHONHASHSEED": str(number)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-800:]
        different += done.stdout.split()[-1] != expected
    return row(f"training, saving, sampling with {name}, again", different, 0, "processes that differ")


def batches(name: str, family: Family, rows: int = 8) -> Row:
    """Each row by itself against the batch: libraries add in another order, so to rounding."""
    model = patched(name, family)
    ids = token_ids(rows, 33)
    full = logits(model, ids)
    single_rows = torch.cat([logits(model, ids[number : number + 1]) for number in range(rows)])
    return row(f"batch invariance of {name} on {family}", relative_error(single_rows, full), 2e-5, "relative error")


# --------------------------------------------------------------------------------------------------------------------
# Threads


def threads(first: str, second: str, repeats: int) -> Row:
    """Two models generate at the same time, each in its own thread, as they do by themselves."""
    models = [patched(first, LLAMA), patched(second, GPT2)]
    prompts = [token_ids(2, 7, seed=seed) for seed in range(2)]

    def generate(number: int) -> list[Tensor]:
        settings = {"max_new_tokens": 16, "do_sample": False, "num_beams": 2}
        return [models[number].generate(prompts[number], **settings) for _ in range(repeats)]

    expected = [generate(number)[0] for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(generate, range(2)))
    wrong = sum(not torch.equal(out, expected[number]) for number in range(2) for out in together[number])
    return row(f"{first} and {second} in two threads", wrong, 0, "outputs that differ", generations=2 * repeats)
