"""Convert an encoder on documents longer than its pretrained positions.

    python recipes/long_documents.py MODEL --output out
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/long_documents.py \\
        --config recipes/configs/long-documents-gpu.yaml MODEL --output out

Needs the `train` extra. Without --config the options are those of `recipes/configs/long-documents-cpu.yaml`: film
reviews (IMDB, from the Hub or from `--data.folder`). Any csv, json or parquet file with a text and a label column will
do: `--data.task null --data.dataset FILE --data.text_columns COLUMN`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import hf_linear_attn as hla
from hf_linear_attn.cli import parse_verb, with_default_config
from hf_linear_attn.cli.running import exit_code

CONFIG = Path(__file__).parent / "configs" / "long-documents-cpu.yaml"


def main(arguments: Sequence[str] | None = None) -> None:
    hla.convert(parse_verb("convert", with_default_config(arguments, CONFIG)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
