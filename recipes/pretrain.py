"""A decoder from scratch: a tokenizer, then next-token prediction on any text.

    python recipes/pretrain.py --data.dataset TEXT --output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/pretrain.py \\
        --config recipes/configs/pretrain-gpu.yaml --data.dataset TEXT --output out

Needs the `train` extra. Without --config the options are those of `recipes/configs/pretrain-cpu.yaml`. TEXT is a
local file or folder, or a data set on the Hub; csv, json, parquet and plain text are read, and `--data.text_columns`
names the column.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import hf_linear_attn as hla
from hf_linear_attn.cli import parse_verb, with_default_config
from hf_linear_attn.cli.running import exit_code

CONFIG = Path(__file__).parent / "configs" / "pretrain-cpu.yaml"


def main(arguments: Sequence[str] | None = None) -> None:
    hla.finetune(parse_verb("finetune", with_default_config(arguments, CONFIG)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
