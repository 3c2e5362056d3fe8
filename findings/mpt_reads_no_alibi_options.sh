#!/usr/bin/env bash
# MPT stores attn_config.alibi and attn_config.alibi_bias_max, and reads neither: every model has ALiBi, with slopes for 8.
#
# torch 2.13.0, transformers 5.24.0. The second option sets the slopes, 2^(-alibi_bias_max k / heads), and the model
# builds them without it. A checkpoint that was trained elsewhere with another value, or without ALiBi, gives other
# outputs here than where it comes from, and no warning. `clip_qkv`, beside them in the same config, is read.
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
from transformers import MptConfig, MptModel


def outputs(**options):
    torch.manual_seed(0)
    model = MptModel(MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=20, attn_config=options)).eval()
    with torch.no_grad():
        return model.config.attn_config, model(torch.arange(20)[None]).last_hidden_state


reference = outputs()[1]
for options in ({"alibi_bias_max": 16}, {"alibi": False}, {"clip_qkv": 0.001}):
    config, out = outputs(**options)
    assert all(getattr(config, name) == value for name, value in options.items())
    print(f"{options}: largest difference {float((out - reference).abs().max()):.4f}")
    assert torch.equal(out, reference) == ("clip_qkv" not in options), "MPT reads these options now."
PYTHON
