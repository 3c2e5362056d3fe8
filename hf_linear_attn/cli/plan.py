"""`hf-linear-attn plan`."""

import hf_linear_attn as hla

from ..study.options import PlanConfig
from .verb import Verb

VERB = Verb(
    "choose which heads stay exact, and the windows of the others, for a budget of quality, speed or cache",
    PlanConfig,
    lambda config: hla.plan(config).exit_code,
    ("model",),
    """\
hf-linear-attn plan gpt2 --budget "2% perplexity" --data.dataset wiki.txt --output plan
hf-linear-attn plan gpt2 --budget "1.5x at 4096" --data.dataset wiki.txt --data.max_length 1024
hf-linear-attn plan ./bert-sst2 --budget "0.5 points" --data.task sst2
hf-linear-attn patch gpt2 out --plan plan/plan.json

The exit code is 0 if the budget is met, 1 if it is not, and 3 if the data cannot measure it.""",
)
