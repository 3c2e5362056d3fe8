"""Fidelity of every mechanism on a real checkpoint: how near each is to softmax, before and after attention transfer.

    python -m recipes.benchmarks.fidelity
    python -m recipes.benchmarks.fidelity --model PATH --dataset FILE

Needs the `demo` extra. `--model` is a folder or a Hub name (default: the encoder of the demo), `--dataset` a text file
(default: the documentation of the standard library). Every mechanism that is registered for the model's direction is
measured with its default options: KL of the attention weights, relative error of the outputs, cosine of the final
hidden states, and perplexity (decoders) or agreement of sentence embeddings (encoders). The records are in
`OUTPUT/MODEL/records.jsonl`; each is on disk at once, and a second run continues. On two cores a mechanism takes one to
three minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from hf_linear_attn import Evaluation, evaluate
from hf_linear_attn.demo import resolve_model
from hf_linear_attn.registry import ATTENTIONS, list_attentions
from hf_linear_attn.study.loading import is_decoder
from hf_linear_attn.study.settings import PYTHON_DOCUMENTATION, EvaluateConfig, EvaluationData
from hf_linear_attn.utils.progress import ConsoleProgress


def mechanism_names(causal: bool) -> list[str]:
    """The mechanisms of one direction, without softmax itself."""
    entries = {name: ATTENTIONS.get(name) for name in list_attentions() if name != "softmax"}
    return [name for name, entry in entries.items() if (entry.causal if causal else entry.bidirectional)]


def split_at(tokenizer: Any, pattern: str) -> None:
    """Give a tokenizer the splitting that its tokenizer.json has lost: every match of the pattern is one token."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")


def measure(arguments: argparse.Namespace) -> Evaluation:
    """Evaluate the model without timing, and save the result."""
    source, name = resolve_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if arguments.split is not None:
        split_at(tokenizer, arguments.split)
    folder = arguments.output / Path(name).name
    config = EvaluateConfig(
        attention=tuple(arguments.attention or mechanism_names(is_decoder(AutoConfig.from_pretrained(source)))),
        data=EvaluationData(dataset=arguments.dataset or PYTHON_DOCUMENTATION),
        steps=arguments.steps,
        seed=arguments.seed,
        name=name,
        resume=True,
    )
    with ConsoleProgress() as progress:
        evaluation = evaluate(
            source, tokenizer=tokenizer, output=folder, progress=progress, config=config, timing=False
        )
    evaluation.save(folder)
    return evaluation


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name (default: the encoder of the demo)")
    parser.add_argument("--dataset", help="text file (default: documentation of the standard library)")
    parser.add_argument("--split", metavar="REGEX", help="what a token is, for a tokenizer that has lost its splitting")
    parser.add_argument("--attention", nargs="+", help="mechanisms (default: all of the model's direction)")
    parser.add_argument("--steps", type=int, default=100, help="steps of attention transfer (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("recipes/results/fidelity"), help="folder of the results")
    evaluation = measure(parser.parse_args(argv))
    Console().print(evaluation.summary().to_markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
