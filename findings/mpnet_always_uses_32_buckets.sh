#!/usr/bin/env bash
# MPNet's config.relative_attention_num_buckets sizes the table of position biases; distances fall into 32 buckets anyway.
#
# torch 2.13.0, transformers 5.24.0. The function that finds the bucket of a distance has its own default of 32, and the
# model does not hand the config's number to it. With 64 buckets the second half of the table is never read: it gets no
# gradient and is saved with the checkpoint. With 16 a forward pass of more than eight tokens ends in an IndexError. T5,
# whose option has the same name, uses all of its buckets.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache TRANSFORMERS_VERBOSITY=error
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import MPNetConfig, MPNetModel, T5Config, T5EncoderModel

ids = torch.arange(3, 43)[None].repeat(1, 12)  # 480 tokens


def read_rows(model, table):
    """How many rows of the table of biases get a gradient."""
    model(ids).last_hidden_state.pow(2).sum().backward()
    return int((table.weight.grad.abs().sum(1) > 0).sum())


def mpnet(buckets):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = MPNetConfig(vocab_size=50, max_position_embeddings=600, relative_attention_num_buckets=buckets, **sizes)
    model = MPNetModel(config).eval()
    return read_rows(model, model.encoder.relative_attention_bias)


def t5(buckets):
    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    config.relative_attention_num_buckets = buckets
    model = T5EncoderModel(config).eval()
    return read_rows(model, model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias)


torch.manual_seed(0)
rows = {buckets: (mpnet(buckets), t5(buckets)) for buckets in (32, 64)}
for buckets, (of_mpnet, of_t5) in rows.items():
    print(f"{buckets} buckets: MPNet reads {of_mpnet} rows of the table, T5 {of_t5}")
assert rows[64][0] == rows[32][0] < 33 < rows[64][1], "MPNet uses the number of buckets of its config now."
try:
    mpnet(16)
except IndexError as error:
    print(f"16 buckets: IndexError: {error}")
else:
    raise AssertionError("MPNet takes 16 buckets now.")
PYTHON
