#!/usr/bin/env bash
# A boolean 4-D attention mask hides nothing in eager attention, without an error; sdpa obeys it.
#
# torch 2.13.0, transformers 5.24.0. Eager attention adds the mask to the logits: False is + 0 and True is + 1, so every
# token is seen, and those that should be hidden weigh e times less at most. Seen for Llama, GPT-2 and BERT, among others
# (Qwen3, Mistral, GPT-NeoX, RoBERTa, T5 the same). The same mask as zeros and large negative numbers is right in both.
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
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
configs = [
    LlamaConfig(vocab_size=50, initializer_range=0.4, **sizes),
    GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4),
    BertConfig(vocab_size=50, initializer_range=0.4, **sizes),
]
ids = torch.randint(3, 50, (1, 12))
visible = torch.ones(12, 12, dtype=torch.bool).tril()
visible[4:, 3] = False  # token 3 is hidden from all later ones
boolean = visible[None, None]
additive = torch.zeros(1, 1, 12, 12).masked_fill(~boolean, torch.finfo(torch.float32).min)
moved = ids.clone()
moved[0, 3] += 1  # who does not see token 3 cannot notice this

for config in configs:
    model = AutoModel.from_config(config).eval()
    changes = {}
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for kind, mask in (("boolean", boolean), ("additive", additive)):
            with torch.no_grad():
                before, after = (model(tokens, attention_mask=mask)[0][:, 4:] for tokens in (ids, moved))
            changes[attention, kind] = float((before - after).abs().max() / before.abs().max())
    print(type(model).__name__, {" ".join(key): f"{value:.1e}" for key, value in changes.items()})
    leaks = changes.pop(("eager", "boolean"))
    assert leaks > 0.05, f"Eager attention obeys the boolean mask now: {leaks}."
    assert max(changes.values()) == 0.0, changes
PYTHON
