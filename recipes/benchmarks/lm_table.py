"""What converting a decoder costs in perplexity, beside the equally tuned exact model, and at which positions.

    python -m recipes.benchmarks.lm_table --model MODEL --text TEXT --name NAME --work WORK

Needs the `train` extra. Every variant goes through the same steps: the exact model (the control), the default hybrid
(`window` over hedgehog features), each of its halves by itself, and other mechanisms. Afterwards perplexity is measured
on the held-out documents with windows of `data.max_length` tokens, half a window apart, and the loss by position. A
finished variant is a row of `--out` at once, and is not repeated by a second call. Settings:
`recipes/benchmarks/configs/lm-table.yaml`, with `--section.name value` over it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_linear_attn import load_pretrained
from hf_linear_attn.data.task_data import DEFAULT_MAX_LENGTH, load_splits
from hf_linear_attn.data.text import packed_rows
from hf_linear_attn.measure.quality import measure_perplexity
from hf_linear_attn.training.convert import convert
from hf_linear_attn.training.options import ConvertConfig
from hf_linear_attn.utils.arguments import parse_config
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.options import to_dict

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"

#: Mechanism and options of each variant. A mixing weight of e^-30 switches the part outside of the window off.
VARIANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "softmax": (None, {}),
    "window + hedgehog": ("window", {}),
    "hedgehog": ("hedgehog", {}),
    "window only": ("window", {"mix_init": -30.0}),
    "gla": ("gla", {}),
    "gated-delta": ("gated-delta", {}),
    "linformer-causal": ("linformer-causal", {}),
    "elu": ("elu", {}),
    "favor+": ("favor+", {}),
}


def variant_config(base: ConvertConfig, variant: str, window: int, seed: int, folder: Path) -> ConvertConfig:
    """One variant's settings."""
    attention, options = VARIANTS[variant]
    if attention == "window":
        options = {**options, "window_size": window}
    return replace(
        base,
        attention=attention,
        options=options,
        seed=seed,
        output=str(folder),
        resume=folder.exists(),
        control=attention is None,
    )


def documents(base: ConvertConfig, model: str, tokens: int) -> list[list[int]]:
    """Held-out text of a run, as token ids."""
    column = base.data.text_columns[0]
    data = load_splits(base.data, (column,))
    return packed_rows(AutoTokenizer.from_pretrained(model), data["validation"][column], tokens)[:1]


def perplexity(model: PreTrainedModel, documents: list[list[int]], context: int) -> dict[str, Any]:
    """Token-weighted perplexity at a context, windows half of it apart, with the loss in each eighth of the window."""
    return asdict(measure_perplexity(model.eval(), documents, context=context, stride=context // 2, batch_size=8))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def check_head(path: Path, head: dict[str, Any]) -> None:
    """Raise a ValueError where a file holds rows that were made with other settings."""
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in head.items():
        if before.get(name) != json.loads(json.dumps(value)):
            raise ValueError(
                f"{str(path)!r} was made with {name} {before.get(name)!r}, now {value!r}. Give another --out."
            )


def run_variant(config: ConvertConfig, documents: list[list[int]], contexts: list[int]) -> dict[str, Any]:
    """Convert, measure, and keep the numbers."""
    began = time.perf_counter()
    folder = Path(str(config.output))
    results = convert(config, console=Console(stderr=True))
    exact = config.attention is None
    load: Any = AutoModelForCausalLM.from_pretrained if exact else load_pretrained
    model = load(str(folder / "model"))
    state, options = results["stages"], results["config"]
    options["model"] = options["data"]["dataset"] = options["output"] = None
    return {
        "stages": {name: state[name] for name in ("teacher", "patched", "transferred", "distilled") if name in state},
        "steps": {"transfer": state.get("transfer", {}).get("step", 0), "distill": state["distill"]["step"]},
        "perplexity": {str(context): perplexity(model, documents, context) for context in contexts},
        "seconds": round(time.perf_counter() - began, 1),
        "learned_parameters": results["learned_parameters"],
        "parameters": results["parameters"],
        "data": results["data"],
        "settings": options,
        "environment": results["environment"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the pretrained decoder")
    parser.add_argument("--text", required=True, help="text file, folder or data set")
    parser.add_argument("--name", required=True, help="what the model and the text are called in the results")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, help="default: recipes/results/lm/NAME.json")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--window", type=int, default=64, help="tokens of the exact window (default: 64)")
    parser.add_argument("--contexts", nargs="+", type=int, help="contexts to measure at (default: data.max_length)")
    parser.add_argument("--tokens", type=int, default=50_000, help="held-out tokens to measure on (default: 50,000)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--config", default=str(HERE / "configs" / "lm-table.yaml"))
    arguments, rest = parser.parse_known_args(argv)
    config_arguments = [
        "--config",
        arguments.config,
        "--model",
        arguments.model,
        "--data.dataset",
        arguments.text,
        *rest,
    ]
    base = parse_config(ConvertConfig, config_arguments, program="lm_table")
    out = arguments.out or RESULTS / "lm" / f"{arguments.name}.json"
    contexts = arguments.contexts or [base.data.max_length or DEFAULT_MAX_LENGTH]
    pretrained = AutoModelForCausalLM.from_pretrained(arguments.model)
    for seed in arguments.seeds:
        documents_ids = documents(base, arguments.model, arguments.tokens)
        head = {
            "format_version": 1,
            "name": arguments.name,
            "window": arguments.window,
            "settings": {**to_dict(base.distill), "transfer_steps": base.transfer.max_steps},
        }
        check_head(out, head)
        head["pretrained"] = {str(context): perplexity(pretrained, documents_ids, context) for context in contexts}
        for variant in arguments.variants:
            if any((row["variant"], row["seed"]) == (variant, seed) for row in read_rows(out)):
                continue
            folder = arguments.work / f"seed{seed}" / variant.replace(" ", "-")
            config = variant_config(base, variant, arguments.window, seed, folder)
            row = {"variant": variant, "seed": seed, **run_variant(config, documents_ids, contexts)}
            write_json(out, {**head, "rows": [*read_rows(out), row]})
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
