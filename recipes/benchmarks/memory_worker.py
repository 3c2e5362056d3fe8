"""Measures peak memory: reads a request a line (JSON) from its input, answers with a line; a fresh fork for each.

Without `fork` the process measures itself, which needs freed memory to go back to the system first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel

from hf_linear_attn.measure.memory import peak_memory
from hf_linear_attn.patching import patch_model

from . import workloads
from .bench import BASELINE
from .ops import PASSES


def main() -> None:
    workloads.mechanism_names(None)  # imported once, before the forks
    for line in sys.stdin:
        sys.stdout.write(_answer(line) + "\n")
        sys.stdout.flush()


def _answer(line: str) -> str:
    request = json.loads(line)
    if not hasattr(os, "fork") or request["device"] != "cpu":
        return json.dumps(_try(request))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as out:
            out.write(json.dumps(_try(request)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"its process ended with status {status}, perhaps for want of memory"})


def _try(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return measure(request)
    except (*workloads.UNSUPPORTED_ERRORS, RuntimeError, MemoryError) as error:
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes beyond what was held before the call: `bytes`, those of the output, and their ratio.

    A short call comes first, so that libraries that are loaded on first use do not count.
    """
    torch.set_num_threads(request["threads"])
    device = torch.device(request["device"])
    make = _attention if request["what"] == "attention" else _layer
    make({**request, "length": min(256, request["length"])}, device)[0]()
    call, output = make(request, device)
    peak = peak_memory(call, device)
    if peak is None:
        return {"error": "this system does not tell the peak of the resident set (it takes Linux)"}
    return {"bytes": peak, "output_bytes": output, "to_output": peak / output}


def _attention(request: dict[str, Any], device: torch.device) -> tuple[Callable[[], object], int]:
    batch, heads, length, dim = (request[name] for name in ("batch", "heads", "length", "head_dim"))
    causal, backward = request["direction"] == "causal", request["pass"] == PASSES[True]
    inputs = workloads.Inputs.make(batch, heads, length, dim, torch.float32, device, request["seed"])
    output = inputs.value.nbytes
    if request["name"] == BASELINE:
        return workloads.exact_call(inputs, causal, backward), output
    if request["mechanism"] is None:
        return _eager(inputs, causal, backward), output
    module = workloads.build(
        request["mechanism"],
        heads=heads,
        head_dim=dim,
        longest=max(length, 256),
        causal=causal,
        seed=request["seed"],
        device=device,
    )
    return workloads.on_backend(workloads.timed_call(module, inputs, causal, backward), request["backend"]), output


def _eager(inputs: workloads.Inputs, causal: bool, backward: bool) -> Callable[[], object]:
    if backward:

        def attend(query: Any, key: Any, value: Any) -> Any:
            return workloads.eager(workloads.Inputs(query, key, value, inputs.gradient), causal)

        return workloads.forward_backward(attend, inputs)

    def run() -> object:
        with torch.no_grad():
            return workloads.eager(inputs, causal)

    return run


def _layer(request: dict[str, Any], device: torch.device) -> tuple[Callable[[], object], int]:
    """The first attention layer of BERT-base: projections, attention, output, residual and norm; hidden states
    `[1, L, 768]` are given."""
    length = request["length"]
    torch.manual_seed(request["seed"])
    model = BertModel(BertConfig(num_hidden_layers=1, vocab_size=8, max_position_embeddings=length)).eval().to(device)
    if request["mechanism"] is not None:
        entry = workloads.ATTENTIONS.get(request["mechanism"])
        patch_model(model, request["mechanism"], **workloads.options_of(entry, request["seed"]))
    layer, hidden = model.encoder.layer[0].attention, torch.randn(1, length, 768, device=device)

    def run() -> object:
        with torch.no_grad():
            return layer(hidden, attention_mask=None)

    return workloads.on_backend(run, request["backend"]), hidden.nbytes


if __name__ == "__main__":
    main()
