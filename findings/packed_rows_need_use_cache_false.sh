#!/usr/bin/env bash
# Documents packed into a row are kept apart by position_ids only with use_cache=False; and a jump ahead cuts a row.
#
# torch 2.13.0, transformers 5.24.0. Transformers finds packed documents by positions that do not go up by one, and looks
# for them only where there is no cache. So a decoder in its default (use_cache=True) lets the second document see the
# first, without a warning (also a teacher of a distillation in evaluation mode); and without a cache, positions that
# jump ahead, as in PoSE training, hide all that stands before the jump. Seen for Llama, Qwen3 and GPT-NeoX.
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
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen3Config

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"vocab_size": 50, "initializer_range": 0.4}
configs = [LlamaConfig(**sizes), Qwen3Config(num_key_value_heads=2, head_dim=8, **sizes), GPTNeoXConfig(**sizes)]
ids = torch.randint(3, 50, (1, 12))
first, second = torch.arange(6), torch.arange(6)
restart = torch.cat([first, second])[None]
jump = torch.cat([first, second + 20])[None]

for config in configs:
    model = AutoModelForCausalLM.from_config(config).eval()

    def logits(tokens, **inputs):
        with torch.no_grad():
            return model(tokens, **inputs).logits

    def difference(a, b):
        return float((a - b).abs().max() / b.abs().max())

    alone = logits(ids[:, 6:])
    mixed = difference(logits(ids, position_ids=restart)[:, 6:], alone)
    apart = difference(logits(ids, position_ids=restart, use_cache=False)[:, 6:], alone)
    cached, uncached = (logits(ids, position_ids=jump, use_cache=flag) for flag in (True, False))
    cut = difference(uncached, cached)
    tail = difference(uncached[:, 6:], logits(ids[:, 6:], position_ids=jump[:, 6:], use_cache=False))
    name = type(model).__name__
    print(f"{name}: second document off by {mixed:.2f} with a cache, {apart:.0e} without; a jump moves logits by {cut:.2f}")
    assert mixed > 0.05, "With a cache, packed documents are kept apart now."
    assert apart < 1e-4
    assert cut > 0.05 and tail < 1e-4, "Without a cache, a jump of positions no longer hides what stands before it."
PYTHON
