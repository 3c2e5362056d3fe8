"""Tiny models with terms in their logits, trained from scratch and converted: what the conversion costs.

    python recipes/terms.py --folder GLUE --tokenizer bert-base-uncased --output out

A DeBERTa classifies the sentences of SST-2, and a T5 fills in the gaps of repeated words that are made here. Each is
converted by what the README's command does, beside the exact model after the same training (the control).
`out/results.json` has options and scores. Needs the `train` extra; some minutes on two cores.
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

#: Words of the made texts: so many stand in a row, which is repeated, and a share of them is hidden by the gap.
NAMES = [f"w{number}" for number in range(20)]
GAP = "gap"
PERIOD, REPEATS, HIDDEN = 5, 12, 0.3

DEBERTA = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32, "share_att_key": True},
    **{"max_relative_positions": 128, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
}
T5 = {
    **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    **{"relative_attention_num_buckets": 16, "relative_attention_max_distance": 32, "decoder_start_token_id": 0},
}
#: What is common to the exact model's training and to the conversion, what the first one adds, and what the second.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "deberta": (
        {"task_type": "classification", "data": {"task": "sst2", "max_length": 128, "max_train_samples": 8000}},
        {"model_type": "deberta-v2", "config": DEBERTA, "train": {"learning_rate": 1e-3}},
        {"options": {"window_size": 32}, "distill": {"learning_rate": 1e-4, "num_train_epochs": 1.0}},
    ),
    "t5": (
        {"task_type": "seq2seq-lm", "data": {"text_columns": ["text", "target"], "max_length": 128}},
        {"model_type": "t5", "config": T5, "train": {"learning_rate": 3e-3, "num_train_epochs": 2.0}},
        {
            "options": {"window_size": 20},
            "distill": {"learning_rate": 2e-4, "num_train_epochs": 1.0},
            "transfer": {"max_steps": 60},
        },
    ),
}


def made_text(generator: random.Random) -> dict[str, str]:
    """Return a row of words, repeated, with gaps, and without them."""
    words = generator.choices(NAMES, k=PERIOD) * REPEATS
    text = [GAP if generator.random() < HIDDEN else word for word in words]
    return {"text": " ".join(text), "target": " ".join(words)}


def write_texts(folder: Path, rows: dict[str, int]) -> None:
    """Write made texts, and a tokenizer of their words."""
    generator = random.Random(0)
    for split, count in rows.items():
        lines = [json.dumps(made_text(generator)) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["<pad>", "</s>", "<unk>", GAP, *NAMES]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "tokenizer")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder with the files of GLUE (default: the Hub)")
    parser.add_argument("--tokenizer", default="bert-base-uncased", help="of DeBERTa")
    parser.add_argument("--texts", type=int, default=2400, help="made texts to train on")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="which of the runs")
    parser.add_argument("--steps", type=int, help="at most so many steps of each training")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    texts = chosen.output / "texts"
    texts.mkdir(parents=True)
    write_texts(texts, {"train": chosen.texts, "validation": 300})
    results = []
    for name in chosen.runs:
        common, first, second = RUNS[name]
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
        settings = {**second, "distill": {**second["distill"], **limit}, "control": True}
        if limit:
            settings["transfer"] = limit
        result = hla.convert(**shared, **settings, model=str(folder / "exact" / "model"), output=str(folder / "linear"))
        scores = {stage: values for stage, values in asdict(result.scores).items() if values is not None}
        options = {"data": common["data"], "train": train, **second}
        facts = {"name": name, "model_type": first["model_type"], "config": first["config"], "options": options}
        results.append({**facts, "metric": result.score.metric, **scores})
        facts = {"environment": result.environment, "defaults": defaults_of(results)}
        write_json(chosen.output / "results.json", {**facts, "rows": results})


if __name__ == "__main__":
    sys.exit(exit_code(main))
