"""A decoder from scratch: a tokenizer, then next-token prediction on any text.

    python recipes/pretrain.py --data.source TEXT --run.output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/pretrain.py \\
        --config recipes/configs/pretrain-gpu.yaml --data.source TEXT --run.output out

Needs the `train` extra. Without --config the settings are those of `recipes/configs/pretrain-cpu.yaml`. TEXT is a
local file or folder, or a data set on the Hub (csv, json, parquet and plain text are read; `--data.text` names the
column).
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_linear_attn.training.entry import recipe

if __name__ == "__main__":
    sys.exit(recipe("finetune", str(Path(__file__).parent / "configs" / "pretrain-cpu.yaml")))
