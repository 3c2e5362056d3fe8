"""`hf-linear-attn convert`."""

import hf_linear_attn as hla

from ..training.options import ConvertConfig
from .verb import Verb


def run(config: ConvertConfig) -> None:
    hla.convert(config)


VERB = Verb(
    "convert a fine-tuned model: attention transfer, distillation, a measured checkpoint with a card",
    ConvertConfig,
    run,
    ("model",),
    """\
hf-linear-attn convert ./bert-sst2 --data.task sst2 --output out
hf-linear-attn convert ./bert --teacher.num_train_epochs 3 --data.dataset reviews.csv --output out
hf-linear-attn convert gpt2 --data.dataset wiki.txt --output out
hf-linear-attn convert --config recipe.yaml --distill.learning_rate 1e-4
accelerate launch -m hf_linear_attn convert --config recipe.yaml""",
)
