"""Whole models of known shapes with random weights: passes, decoding, torch.compile, attention transfer."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.integration.discovery import longest_input
from hf_linear_attn.measure.speed import DECODING, measure_decoding, measure_passes, timing_options
from hf_linear_attn.registry import ATTENTIONS, seed_options
from hf_linear_attn.study.variants import WITHOUT_ATTENTION
from hf_linear_attn.training.head_search import ExactHeads, heads_table
from hf_linear_attn.training.transfer import AttentionTransferLoss
from hf_linear_attn.utils.memory import peak_memory
from hf_linear_attn.utils.models import shared_copy
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .runner import Cell, Cells, Rows
from .workloads import BASELINE, FEW, Call, ratio, spread

TOKENS = (7,)

#: Variants of windows, beside the names of mechanisms: their options, and the share of exact heads (of decoders).
WINDOWS: dict[str, tuple[dict[str, Any], float]] = {
    "window, hedgehog outside": ({"feature_map": "hedgehog"}, 0.0),
    "window, 32 codes outside": ({"feature_map_options": {"num_features": 32}}, 0.0),
    "window of 384": ({"window_size": 384}, 0.0),
    "window of 384, 20 % of the heads exact": ({"window_size": 384}, 0.2),
    "the same in int8": ({"window_size": 384, "cache_dtype": "int8"}, 0.2),
}


def with_windows(model: Any, name: str) -> Any:
    """Return a copy of a model with one of `WINDOWS`; exact heads are drawn."""
    options, share = WINDOWS[name]
    count = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    scores = {layer: torch.zeros(count) for layer in range(model.config.num_hidden_layers)}
    table = heads_table(scores, "score").sample(frac=1, random_state=0)
    chosen = ExactHeads.first_rows(table, round(share * len(table)), {"attention": "window", **options})
    return patch_model(shared_copy(model), chosen.plan())


def _patched(model: Any, names: Any, longest: int, seed: int) -> dict[str, Any]:
    """The exact model, copies of it with each mechanism, which share its weights, and one without attention."""
    models = {BASELINE: model, WITHOUT_ATTENTION: without_attention(model)}
    models |= {name: with_windows(model, name) for name in names if name in WINDOWS}
    for name in workloads.mechanism_names([name for name in names if name not in WINDOWS], model.can_generate()):
        entry = ATTENTIONS.get(name)
        options = timing_options(entry, seed_options(entry, seed), longest_input(model), longest)
        models[name] = patch_model(shared_copy(model), name, **options)
    return models


def models(
    attention: tuple[str, ...] = FEW,
    shapes: tuple[str, ...] = ("BERT-base", "GPT-2 small"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    passes: tuple[str, ...] = ("forward", "decoding"),
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    batches: tuple[int, ...] = (1,),
    seconds: float = 5.0,
    longest_exact: int | None = None,
    memory: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Cells:
    """Whole models: the speedup of each mechanism beside that of the model without attention, the highest possible.

    `hf-linear-attn evaluate` measures a checkpoint in this way, with its quality.

    Args:
        attention: Names of mechanisms, and of `WINDOWS`.
        shapes: BERT-base, GPT-2 small, SmolLM2-135M, all-MiniLM-L6-v2, and others of `workloads.SHAPES`.
        dtypes: Names of torch dtypes.
        passes: forward, forward+backward, and of decoders prefill and decoding (one token after a context).
        lengths: Tokens of the row, or of the context.
        batches: Numbers of rows.
        seconds: Time for each cell; at least three rounds are timed.
        longest_exact: Where inputs are longer, the exact model is left out, and speedups are over the model without
            attention.
        memory: Whether to measure the peak memory of a pass, too.
        seed: Of random weights and random features.
        device: A torch device.
    """
    for shape in shapes:
        for dtype in dtypes:
            model = workloads.model_of(shape, max(lengths) + 1024, seed=seed, dtype=dtype, device=device)
            all_models = _patched(model, attention, max(lengths) + 1024, seed)
            settings = {"names": list(all_models), "seconds": seconds, "seed": seed}
            for done in passes:
                if done in ("prefill", DECODING) and not model.can_generate():
                    continue
                for length, batch in product(sorted(lengths), batches):
                    facts = {"model": shape, "dtype": dtype, "pass": done, "length": length, "batch": batch}
                    timed = dict(all_models)
                    if longest_exact is not None and length > longest_exact:
                        del timed[BASELINE]
                    yield Cell(facts, partial(_measure, timed, done, length, batch, seconds, memory), settings)


def _measure(all_models: Mapping[str, Any], done: str, length: int, batch: int, seconds: float, memory: bool) -> Rows:
    baseline = BASELINE if BASELINE in all_models else WITHOUT_ATTENTION
    options: dict[str, Any] = {"baseline": baseline, "seconds": seconds, "batch_size": batch}
    if done == DECODING:  # without attention a model has no cache
        chosen = {name: model for name, model in all_models.items() if name != WITHOUT_ATTENTION}
        values = measure_decoding(chosen, TOKENS, length, **options)
    else:
        values = measure_passes(all_models, TOKENS, length, measurement=done, memory=memory, **options)
    rows: Rows = []
    for name, timed in values.items():
        row: dict[str, Any] = {"attention": name}
        for column, prefix, median in (("seconds", "", "seconds"), ("speedup", "speedup_", "speedup")):
            spread = {share: timed[f"{prefix}{share}"] for share in ("p20", "p80")}
            row[column] = {"median": timed[median], **spread, "rounds": timed["rounds"]}
        size = timed.get("cache_bytes" if done == DECODING else "peak_memory")
        rows.append(row if size is None else {**row, "bytes": size})
    return rows


# --------------------------------------------------------------------------------------------------------------------
# torch.compile

#: Tokens of the shorter of the two calls of `generate` whose difference is a sample.
FEW_TOKENS = 2


def compiled(
    attention: tuple[str, ...] = (BASELINE, "hedgehog", "window"),
    shapes: tuple[str, ...] = ("SmolLM2-135M", "GPT-2 small", "BERT-base"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    length: int = 960,
    tokens: int = 24,
    rounds: int = 5,
) -> Cells:
    """What torch.compile gains: a forward pass and a token of `generate`, eager and compiled, exact and linear.

    Eager models decode with the default cache, compiled ones with the static cache, whose layers are recurrent states
    where attention is linear. All variants of a model take turns. Needs a C++ compiler; three quarters of an hour, most
    of which torch.compile takes.

    Args:
        attention: Names of mechanisms, and sdpa.
        shapes: BERT-base, GPT-2 small, SmolLM2-135M, all-MiniLM-L6-v2.
        dtypes: Names of torch dtypes.
        length: Tokens of the prompt.
        tokens: Tokens that are generated, which a sample is divided by.
        rounds: Samples of each variant.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 100  # of one piece of code of Transformers, which all models here share
    for shape in shapes:
        for dtype in dtypes:
            exact = workloads.model_of(shape, length + FEW_TOKENS + tokens, dtype=dtype)
            works = {"forward": _forward_calls} | ({"token": _token_calls} if exact.can_generate() else {})
            for work, calls_of in works.items():
                call = partial(_compare_compiled, calls_of, exact, attention, length, tokens, rounds)
                settings = {"names": attention, "length": length, "tokens": tokens, "rounds": rounds}
                yield Cell({"model": shape, "dtype": dtype, "work": work}, call, settings)


def _compare_compiled(calls_of: Any, exact: Any, names: tuple[str, ...], length: int, tokens: int, rounds: int) -> Rows:
    torch._dynamo.reset()
    calls: dict[Any, Call] = {}
    for name in names:
        for is_compiled in (False, True):
            model = shared_copy(exact) if name == BASELINE else patch_model(shared_copy(exact), name)
            if is_compiled:
                model.forward = torch.compile(model.forward)
            for index, call in enumerate(calls_of(model, length, tokens, is_compiled)):
                calls[name, is_compiled, index] = call
    # The first call compiles, and the second one warms up.
    counts: dict[str, int] = {"warmup": 2, "min_rounds": rounds, "max_rounds": rounds}
    samples = sample_interleaved(calls, seconds=0.0, repeat=False, **counts)

    def seconds(name: str, is_compiled: bool) -> Any:
        long, *short = (np.array(samples[key]) for key in calls if key[:2] == (name, is_compiled))
        return (long - short[0]) / tokens if short else long

    return [
        {
            "attention": name,
            "eager": spread(seconds(name, False)),
            "compiled": spread(seconds(name, True)),
            "speedup": ratio(seconds(name, False), seconds(name, True)),
        }
        for name in names
    ]


def _forward_calls(model: Any, length: int, tokens: int, is_compiled: bool) -> list[Call]:
    ids = torch.full((1, length), TOKENS[0])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # a decoder without a mask traces a full one
    extra = {"use_cache": False, "logits_to_keep": 1} if model.can_generate() else {}
    return [torch.no_grad()(partial(model, **inputs, **extra))]


def _token_calls(model: Any, length: int, tokens: int, is_compiled: bool) -> list[Call]:
    """Return two calls of `generate`, the longer one first: their difference is the time of the tokens."""
    options = {"do_sample": False, "pad_token_id": 0} | ({"cache_implementation": "static"} if is_compiled else {})
    generate = partial(model.generate, torch.full((1, length), TOKENS[0]), **options)
    return [partial(generate, max_new_tokens=n, min_new_tokens=n) for n in (FEW_TOKENS + tokens, FEW_TOKENS)]


# --------------------------------------------------------------------------------------------------------------------
# Attention transfer


def transfer_cost(
    attention: tuple[str, ...] | None = None,
    shapes: tuple[str, ...] = ("SmolLM2-135M", "all-MiniLM-L6-v2"),
    lengths: tuple[int, ...] = (128, 512, 2048, 8192),
    seconds: float = 10.0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Cells:
    """What a step of attention transfer costs, in forward passes of the exact model by itself. A quarter of an hour.

    A step is the exact forward pass that yields its inputs, its loss and its gradients, on one row of tokens.

    Args:
        attention: Names of mechanisms, of which those that learn are measured; all by default.
        shapes: BERT-base, GPT-2 small, SmolLM2-135M, all-MiniLM-L6-v2, Llama-3.2-1B.
        lengths: Tokens of the row.
        seconds: Time for each cell; at least three rounds are timed.
        dtype: Name of a torch dtype.
        device: A torch device.
    """
    for shape in shapes:
        for length in lengths:
            model = workloads.model_of(shape, length, dtype=dtype, device=device)
            for name in workloads.mechanism_names(attention, model.can_generate()):
                if ATTENTIONS.get(name).learned:
                    facts = {"model": shape, "length": length, "attention": name}
                    settings = {"seconds": seconds, "dtype": dtype}
                    yield Cell(facts, partial(_transfer_cost, model, name, length, seconds), settings)


def _transfer_cost(model: Any, name: str, length: int, seconds: float) -> Rows:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(1000, 20000, (1, length)).to(model.device)}
    sized = timing_options(ATTENTIONS.get(name), {}, None, length)
    objective = AttentionTransferLoss(patch_model(shared_copy(model), name, **sized))
    calls: dict[str, Call] = {"forward": torch.no_grad()(partial(model.base_model, **batch))}
    calls["step"] = partial(objective, batch, 1)
    with objective.training():
        samples = sample_interleaved(calls, seconds=seconds, device=model.device)
        peak = peak_memory(calls["step"], model.device)
    times = {kind: spread(values) for kind, values in samples.items()}
    return [{**times, "forward_passes": ratio(samples["step"], samples["forward"]), "bytes": peak}]
