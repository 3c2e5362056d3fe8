"""What packing saves: documents of a text as padded batches, and the same documents packed into one row.

    python -m recipes.benchmarks.packing
    python -m recipes.benchmarks.packing --text articles.txt --max-length 1024 --batch-size 32

Needs the package only. The models have random weights: only the lengths of the documents (default: docstrings of the
standard library, a word counted as a token) decide what padding costs. For each direction and mechanism: tokens that a
batch holds, tokens that are computed, forward and backward seconds of both forms in turn (the median over batches of
their ratio), and the largest relative difference of the outputs. Writes recipes/results/packing.json; about two minutes
on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.data.text import padded_batches, read_text
from hf_linear_attn.utils.environment import environment

VOCABULARY = 1000


def models(length: int) -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    bert = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    gpt2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    encoder = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=length, **bert))
    decoder = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=length, use_cache=False, **gpt2))
    return {"both": encoder.eval(), "causal": decoder.eval()}


def packed(documents: list[list[int]]) -> dict[str, Tensor]:
    places = torch.cat([torch.arange(len(document)) for document in documents])
    tokens = [token for document in documents for token in document]
    return {"input_ids": torch.tensor([tokens]), "position_ids": places[None]}


def timed(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Logits, and the seconds of a forward and a backward pass."""
    model.zero_grad()
    began = time.perf_counter()
    logits = model(**batch).logits
    logits.square().mean().backward()
    return logits.detach(), time.perf_counter() - began


def measure(model: PreTrainedModel, batches: list[list[list[int]]]) -> dict[str, Any]:
    """Both forms of every batch, in turn; the first batch once more beforehand, to warm up."""
    ratios, difference = [], 0.0
    for number, documents in enumerate([batches[0], *batches]):
        padded = padded_batches(documents, len(documents), 0)[0]
        wide, slow = timed(model, padded)
        flat, fast = timed(model, packed(documents))
        if number:
            ratios.append(slow / fast)
            unpadded = wide[padded["attention_mask"].bool()]
            difference = max(difference, float((unpadded - flat[0]).abs().max() / unpadded.abs().max()))
    return {"speedup": statistics.median(ratios), "speedups": sorted(ratios), "difference": difference}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="text file (default: docstrings of the standard library)")
    parser.add_argument("--max-length", type=int, default=512, help="documents are cut to so many (default: 512)")
    parser.add_argument("--batch-size", type=int, default=16, help="documents of a batch (default: 16)")
    parser.add_argument("--batches", type=int, default=8, help="batches (default: 8)")
    parser.add_argument("--attention", nargs="+", default=["hedgehog", "window"], help="mechanisms")
    parser.add_argument("--out", type=Path, default=Path("recipes/results/packing.json"), help="the result")
    arguments = parser.parse_args(argv)
    text = read_text(arguments.text)
    generator = torch.Generator().manual_seed(0)
    lengths = [min(len(document.split()), arguments.max_length) for document in text.train]
    order = torch.randperm(len(lengths), generator=generator)[: arguments.batch_size * arguments.batches].tolist()
    documents = [torch.randint(1, VOCABULARY, (max(lengths[k], 2),), generator=generator).tolist() for k in order]
    batches = [
        documents[start : start + arguments.batch_size] for start in range(0, len(documents), arguments.batch_size)
    ]
    tokens = sum(map(len, documents))
    computed = sum(len(batch) * max(map(len, batch)) for batch in batches)
    rows = []
    for attention in arguments.attention:
        for direction, model in models(arguments.max_length).items():
            row = {"attention": attention, "direction": direction}
            rows.append({**row, **measure(hla.patch_model(model, attention), batches)})
            Console().print(rows[-1])
    report = {
        "format_version": 1,
        "settings": {
            "max_length": arguments.max_length,
            "batch_size": arguments.batch_size,
            "documents": len(documents),
        },
        "text": {"source": text.source, "sha256": text.sha256},
        "tokens": {"packed": tokens, "padded": computed},
        "rows": rows,
        "environment": environment(torch.device("cpu")),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
