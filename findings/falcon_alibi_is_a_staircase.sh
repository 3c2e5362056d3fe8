#!/usr/bin/env bash
# Falcon computes ALiBi from absolute positions in bfloat16, in a float32 model too: far neighbours get one bias.
#
# torch 2.13.0, transformers 5.24.0. `build_alibi_tensor` of Falcon rounds slopes and products to bfloat16 (8 bits) and
# casts the result to the model's dtype afterwards. From position 256 on steps of one token are lost: of 2,048 positions
# a head tells 641 apart. BLOOM, which has the same formula, tells all of them apart in float32. A bias counted from the
# distance between query and key is exact nearby; Falcon's error grows with the position.
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
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon

mask = torch.ones(1, 2048, dtype=torch.long)
heads = 8
slopes = [2.0 ** -(head + 1) for head in range(heads)]
exact = torch.tensor(slopes)[:, None] * torch.arange(2048)
seen = {}
for name, build in (("Falcon", falcon), ("BLOOM", bloom)):
    bias = build(mask, heads, torch.float32).reshape(heads, -1)
    seen[name] = int(bias[0].unique().numel())
    error = float((bias - exact).abs().max())
    print(f"{name}: {bias.dtype}, {seen[name]} of 2048 values, largest error {error}, at 1800 to 1803 {bias[0, 1800:1804].tolist()}")
assert seen["BLOOM"] == 2048
assert seen["Falcon"] < 1024, "Falcon tells positions apart in float32 now."
PYTHON
