"""Convert an encoder on a GLUE task: fine-tune, attention transfer, distillation, a checkpoint with a card.

    python recipes/glue.py MODEL --data.task sst2 --output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/glue.py \\
        --config recipes/configs/glue-gpu.yaml MODEL --data.task mnli --output out
    torchrun --nproc_per_node 2 recipes/glue.py MODEL --data.task rte --output out

Needs the `train` extra. Without --config the options are those of `recipes/configs/glue-cpu.yaml`. MODEL is any
encoder, fine-tuned or not (`--teacher.num_train_epochs 0` for one that is). GLUE comes from the Hub, or from
`--data.folder`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import hf_linear_attn as hla
from hf_linear_attn.cli import parse_verb, with_default_config
from hf_linear_attn.cli.running import exit_code

CONFIG = Path(__file__).parent / "configs" / "glue-cpu.yaml"


def main(arguments: Sequence[str] | None = None) -> None:
    hla.convert(parse_verb("convert", with_default_config(arguments, CONFIG)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
