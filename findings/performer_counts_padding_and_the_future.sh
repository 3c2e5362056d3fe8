#!/usr/bin/env bash
# performer-pytorch: a mask empties padded values and leaves their keys in the sum, and causal attention sees the future.
#
# performer-pytorch 1.1.4, torch 2.13.0. Masked tokens keep their share of the denominator: with three padded tokens to
# each real one the output is a quarter as long as without padding (0.26 times), and it depends on what the padding is
# (39 % of it change). Features of keys are scaled by the largest logit of the whole sequence before a constant of 1e-4
# is added to them, so in causal attention, too, an earlier output depends on later keys: a larger last token changes
# the earlier outputs by 25 %, and a prefix has other outputs than the same tokens within a longer text. No error, no
# warning. With a kernel that is not scaled so (generalized_attention=True) causal attention is causal.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 performer-pytorch==1.1.4 local-attention==1.11.2 \
  hyper-connections==0.4.11 torch-einops-utils==0.2.0 axial-positional-embedding==0.3.12 einops==0.8.2
"$work/venv/bin/python" - <<'PYTHON'
import torch
from performer_pytorch import SelfAttention

torch.manual_seed(0)
sizes = {"dim": 32, "heads": 4, "dim_head": 16, "nb_features": 256}
tokens = torch.randn(1, 64, 32)


def change(before, after):
    return float((before - after).norm() / before.norm())


attention = SelfAttention(**sizes, attn_out_bias=False).eval()
real = (torch.arange(64) < 16)[None]
other = tokens.clone()
other[:, 16:] = 2 * torch.randn(1, 48, 32)
with torch.no_grad():
    alone = attention(tokens[:, :16], mask=real[:, :16])
    padded, padded_otherwise = (attention(text, mask=real)[:, :16] for text in (tokens, other))
share, content = float(padded.norm() / alone.norm()), change(padded, padded_otherwise)
print(f"padded: {share:.2f} of the length without padding; other padding changes real tokens by {content:.2f}")
assert share < 0.8 and content > 0.02, "Padded keys are out of the sum now."

louder = tokens.clone()
louder[:, -1] *= 4
seen = {}
for generalized in (False, True):
    attention = SelfAttention(**sizes, causal=True, generalized_attention=generalized).eval()
    with torch.no_grad():
        whole, whole_louder, prefix = (attention(text) for text in (tokens, louder, tokens[:, :32]))
    seen[generalized] = change(whole[:, :-1], whole_louder[:, :-1]), change(whole[:, :32], prefix)
    last, longer = seen[generalized]
    kernel = "ReLU kernel" if generalized else "softmax kernel"
    print(f"causal, {kernel}: a larger last token changes earlier outputs by {last:.4f}, a longer text by {longer:.4f}")
assert seen[False][0] > 0.05 and seen[False][1] > 1e-4, "Causal attention with the softmax kernel is causal now."
assert max(seen[True]) < 1e-5, seen
PYTHON
