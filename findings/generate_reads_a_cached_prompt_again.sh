#!/usr/bin/env bash
# generate() with a cache that holds the whole prompt reads the prompt a second time, and continues another text.
#
# torch 2.13.0, transformers 5.24.0. A prompt was read once and its cache kept for several continuations, as prefix
# caching does. generate(prompt, cache=copy of it) finds no token that is new and feeds all of them: the
# cache grows to twice the prompt, and the tokens differ from those without a cache, without a warning. With a cache of
# all tokens but the last one they are the same.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import copy

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, initializer_range=0.4, **sizes)).eval()
model.generation_config.eos_token_id = None
prompt = torch.randint(3, 50, (1, 12))
settings = {"max_new_tokens": 6, "do_sample": False}
plain = model.generate(prompt, **settings)[0, 12:].tolist()
results, lengths = {}, {}
for read in (11, 12):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :read], cache=cache)
    cache = copy.deepcopy(cache)
    results[read] = model.generate(prompt, cache=cache, **settings)[0, 12:].tolist()
    lengths[read] = cache.get_seq_length()
print(f"without a cache {plain}; 11 of 12 tokens cached {results[11]}; all 12 cached {results[12]}; lengths {lengths}")
assert results[11] == plain and lengths[11] == 17
assert results[12] != plain and lengths[12] == 29, "A cache of the whole prompt is continued, or refused, now."
PYTHON
