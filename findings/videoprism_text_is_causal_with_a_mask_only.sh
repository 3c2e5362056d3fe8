#!/usr/bin/env bash
# A mask of ones changes what VideoPrism's text model computes: with an attention_mask it is causal, without one it is not.
#
# torch 2.13.0, transformers 5.24.0. The model makes its causal mask only where it is given a mask of padding. A text
# without padding therefore has two embeddings: that of a tokenizer's output, whose mask is all ones, and that of its ids
# alone, without a warning. CLIP's text model is causal either way.
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
from transformers import CLIPTextConfig, CLIPTextModel, VideoPrismTextConfig, VideoPrismTextModel

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
ids = torch.arange(3, 13)[None]
other = ids.clone()
other[0, -1] = 40


@torch.no_grad()
def first_token_moves(model, **mask):
    """How far the last token moves the first one's output."""
    states = (model(input_ids=text, **mask).last_hidden_state for text in (ids, other))
    return float(next(states).sub(next(states))[0, 0].abs().max())


seen = {}
for name, config, kind in (
    ("CLIP", CLIPTextConfig, CLIPTextModel),
    ("VideoPrism", VideoPrismTextConfig, VideoPrismTextModel),
):
    torch.manual_seed(0)
    model = kind(config(**SIZES, max_position_embeddings=16)).eval()
    seen[name] = first_token_moves(model), first_token_moves(model, attention_mask=torch.ones_like(ids))
    print(f"{name}: the last token moves the first by {seen[name][0]:.3f} without a mask, {seen[name][1]:.3f} with ones")
assert seen["CLIP"] == (0, 0)
assert seen["VideoPrism"][0] > 0.01 and seen["VideoPrism"][1] == 0, "A mask of ones no longer changes the text model."
PYTHON
