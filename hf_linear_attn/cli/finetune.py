"""`hf-linear-attn finetune`."""

import hf_linear_attn as hla

from ..training.options import FinetuneConfig
from .verb import Verb


def run(config: FinetuneConfig) -> None:
    hla.finetune(config)


VERB = Verb(
    "train a model, with exact or with linear attention, on a task",
    FinetuneConfig,
    run,
    ("model",),
    """\
hf-linear-attn finetune ./bert --data.task rte --data.folder ./glue --output out
hf-linear-attn finetune ./bert --data.task rte --attention hedgehog --output out
accelerate launch -m hf_linear_attn finetune --config recipe.yaml""",
)
