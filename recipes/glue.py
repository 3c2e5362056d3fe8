"""Convert an encoder on a GLUE task: fine-tune, attention transfer, distillation, a checkpoint with a card.

    python recipes/glue.py --model.source MODEL --data.task sst2 --run.output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/glue.py \\
        --config recipes/configs/glue-gpu.yaml --model.source MODEL --data.task mnli --run.output out
    torchrun --nproc_per_node 2 recipes/glue.py --model.source MODEL --data.task rte --run.output out

Needs the `train` extra. Without --config the settings are those of `recipes/configs/glue-cpu.yaml`. MODEL is any
encoder, fine-tuned or not (`--teacher.epochs 0` for one that is). GLUE comes from the Hub, or from `--data.folder`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_linear_attn.training.entry import recipe

if __name__ == "__main__":
    sys.exit(recipe("convert", str(Path(__file__).parent / "configs" / "glue-cpu.yaml")))
