#!/usr/bin/env bash
# A Llama config with sliding_window: the cache obeys it, the attention does not, so the same prompt has two results.
#
# torch 2.13.0, transformers 5.24.0. DynamicCache(config=...) reads config.sliding_window and keeps its last keys only;
# the attention of Llama has no window. In one pass all 12 tokens are seen, token by token 4 of them, without a warning.
# Such configs are saved where a checkpoint was made from a Mistral-like one.
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
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=50, initializer_range=0.4, sliding_window=4, **sizes)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(3, 50, (1, 12))
moved = ids.clone()
moved[0, 0] += 1


def last_logits(tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for index in range(12):
            output = model(tokens[:, index : index + 1], cache=cache)
    return output.logits[:, -1], cache.layers[0].keys.shape[2]


with torch.no_grad():
    whole, whole_moved = (model(tokens, use_cache=False).logits[:, -1] for tokens in (ids, moved))
single, kept = last_logits(ids)
difference = float((single - whole).abs().max() / whole.abs().max())
sees_first = not torch.equal(whole, whole_moved)
print(f"keys kept: {kept} of 12; the last logits differ by {difference:.2f}; one pass sees the first token: {sees_first}")
assert kept == 3 and sees_first and difference > 0.05, "Cache and attention agree on the window now."
PYTHON
