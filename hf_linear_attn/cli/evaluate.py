"""`hf-linear-attn evaluate`."""

from ..study.options import EvaluateConfig
from .verb import Verb


def run(config: EvaluateConfig) -> None:
    from ..study.evaluate import run_evaluate

    run_evaluate(config)


VERB = Verb(
    "measure quality, speed and memory of a model with linear attention, in one report",
    EvaluateConfig,
    run,
    ("model",),
    """\
hf-linear-attn evaluate gpt2 --data.dataset mine.txt --data.max_length 1024
hf-linear-attn evaluate ./bert-sst2 --data.task sst2 --attention hedgehog window --seeds 0 1 2
hf-linear-attn evaluate ./bert-sst2 --data.task sst2 --converted run0/model run1/model
hf-linear-attn evaluate ./encoder --sts glue --speed.batch_size 32 --speed.dtype bfloat16
hf-linear-attn evaluate gpt2 --data.dataset mine.txt --attention elu gla --resume

Every record is on disk at once. Ctrl-C stops; the same command with --resume continues.""",
)
