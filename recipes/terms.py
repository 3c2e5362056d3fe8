"""Tiny models with terms in their logits, trained from scratch and converted: what the conversion costs.

    python recipes/terms.py --folder GLUE --tokenizer bert-base-uncased --output out

A DeBERTa classifies the sentences of SST-2 and is converted by what the README's command does, beside the exact model
after the same training (the control). A T5 reads words in the order of the alphabet and writes them in another one,
twice: what comes the second time stands 17 words back, outside of its decoder's window of 12. Beside it stands the same
with nothing outside of its windows. `out/results.json` has options and scores.
Needs the `train` extra; some minutes on two cores.
"""

import argparse
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import hf_linear_attn as hla
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.study.study import defaults_of
from hf_linear_attn.utils.files import write_json

#: Words of the made texts, and how many of them, each once, are in a row.
NAMES = [f"w{number:02}" for number in range(24)]
ROW = 18

#: The log mixing weight at which nothing outside of windows is attended to, ever.
CLOSED = -10_000.0

DEBERTA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 32,
    "share_att_key": True,
    "max_relative_positions": 128,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
#: How the T5 is converted, whatever lies outside of its windows.
T5_TRAINING = {"transfer": {"max_steps": 100}, "distill": {"learning_rate": 1e-3, "max_steps": 300}}

#: What is common to the exact model's training and to the conversions, what the former adds, and what each of the
#: latter by its name.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "deberta": (
        {"task_type": "classification", "data": {"task": "sst2", "max_length": 128, "max_train_samples": 8000}},
        {"model_type": "deberta-v2", "config": DEBERTA, "train": {"learning_rate": 1e-3}},
        {
            "deberta": {
                "options": {"window_size": 32},
                "distill": {"learning_rate": 1e-4, "num_train_epochs": 1.0},
                "control": True,
            },
        },
    ),
    "t5": (
        {"task_type": "seq2seq-lm", "data": {"text_columns": ["text", "target"], "max_length": 128}},
        {
            "model_type": "t5",
            "config": T5,
            "train": {"learning_rate": 3e-3, "max_steps": 800, "per_device_train_batch_size": 16},
        },
        {
            "t5": {"options": {"window_size": 12}, **T5_TRAINING, "control": True},
            "t5-window-alone": {"options": {"window_size": 12, "mix_init": CLOSED}, **T5_TRAINING},
        },
    ),
}


def made_text(generator: random.Random) -> dict[str, str]:
    """Return words in the order of the alphabet, and twice in another one."""
    sample = generator.sample(NAMES, ROW)
    return {"text": " ".join(sorted(sample)), "target": " ".join(sample * 2)}


def write_texts(folder: Path, rows: dict[str, int]) -> None:
    """Write made texts, and a tokenizer of their words."""
    generator = random.Random(0)
    for split, count in rows.items():
        lines = [json.dumps(made_text(generator)) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = ["<pad>", "</s>", "<unk>", *NAMES]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "tokenizer")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder with the files of GLUE (default: the Hub)")
    parser.add_argument("--tokenizer", default="bert-base-uncased", help="of DeBERTa")
    parser.add_argument("--texts", type=int, default=13000, help="made texts to train on")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="which of the runs")
    parser.add_argument("--steps", type=int, help="at most so many steps of each training")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    texts = chosen.output / "texts"
    texts.mkdir(parents=True)
    write_texts(texts, {"train": chosen.texts, "validation": 200})
    results = []
    for name in chosen.runs:
        common, first, conversions = RUNS[name]
        is_made = common["task_type"] == "seq2seq-lm"
        data = {**common["data"], **({"dataset": str(texts)} if is_made else {"folder": chosen.folder})}
        shared = {**common, "data": data, "speed": {"lengths": []}}
        limit = {} if chosen.steps is None else {"max_steps": chosen.steps}
        folder = chosen.output / common["task_type"]
        tokenizer = AutoTokenizer.from_pretrained(str(texts / "tokenizer") if is_made else chosen.tokenizer)
        tokenizer.save_pretrained(folder / "config")
        sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        AutoConfig.for_model(first["model_type"], **first["config"], **sizes).save_pretrained(folder / "config")
        train = {"num_train_epochs": 1.0, **first["train"], **limit}
        exact = {"model": str(folder / "config"), "from_config": True, "output": str(folder / "exact"), "train": train}
        hla.finetune(**shared, **exact)
        for number, (conversion, settings) in enumerate(conversions.items()):
            parts = {"transfer": limit, "distill": {**settings["distill"], **limit}} if limit else {}
            paths = {"model": str(folder / "exact" / "model"), "output": str(folder / f"linear-{number}")}
            result = hla.convert(**shared, **{**settings, **parts}, **paths)
            scores = {stage: values for stage, values in asdict(result.scores).items() if values is not None}
            options = {"data": common["data"], "train": train, **settings}
            facts = {"model_type": first["model_type"], "config": first["config"], "options": options}
            results.append({"name": conversion, **facts, "metric": result.score.metric, **scores})
            facts = {"environment": result.environment, "defaults": defaults_of(results)}
            write_json(chosen.output / "results.json", {**facts, "rows": results})


if __name__ == "__main__":
    sys.exit(exit_code(main))
