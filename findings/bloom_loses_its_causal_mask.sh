#!/usr/bin/env bash
# BLOOM accepts any registered attention function, never calls it, and then attends to later tokens.
#
# torch 2.13.0, transformers 5.24.0. The name decides which mask the model builds: with one that has no mask function of
# its own there is none at all, and BLOOM (whose attention does not go through the interface) runs its own products
# without it. No error, no warning: the logits of the first token depend on the last one.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, BloomConfig

transformers.logging.set_verbosity_error()
calls = []
AttentionInterface.register("counted", lambda *args, **kwargs: calls.append(args))
ids = torch.arange(3, 15)[None]
moved = ids.clone()
moved[0, -1] += 1
changes = {}
for name in ("eager", "counted"):
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    with torch.no_grad():
        first, second = (model(tokens, use_cache=False).logits[:, 0] for tokens in (ids, moved))
    changes[name] = float((first - second).abs().max() / first.abs().max())
print(f"moving the last token changes the first logits by {changes}; the function was called {len(calls)} times")
assert changes["eager"] == 0.0
assert changes["counted"] > 0.01 and not calls, "BLOOM calls or refuses the function now, or keeps its mask."
PYTHON
