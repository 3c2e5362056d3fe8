"""`hf-linear-attn demo`."""

from ..demo import DemoConfig, run_demo
from .verb import Verb


def run(config: DemoConfig) -> None:
    run_demo(config)


VERB = Verb(
    "evaluate a small model: quality and speed of linear attention beside exact attention",
    DemoConfig,
    run,
    ("model",),
    """\
hf-linear-attn demo
hf-linear-attn demo smollm2
hf-linear-attn demo ./llama --data.dataset mine.txt --full""",
)
