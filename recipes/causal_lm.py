"""Convert a decoder on a text: attention transfer, distillation, perplexity beside the exact model.

    python recipes/causal_lm.py --model.source MODEL --data.source TEXT --run.output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/causal_lm.py \\
        --config recipes/configs/causal-lm-gpu.yaml --model.source MODEL --data.source TEXT --run.output out

Needs the `train` extra. Without --config the settings are those of `recipes/configs/causal-lm-cpu.yaml`. TEXT is a
local file or folder, or a data set on the Hub (csv, json, parquet and plain text are read; `--data.text` names the
column).
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_linear_attn.training.entry import recipe

if __name__ == "__main__":
    sys.exit(recipe("convert", str(Path(__file__).parent / "configs" / "causal-lm-cpu.yaml")))
