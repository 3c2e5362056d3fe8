#!/usr/bin/env bash
# Bamba and MiniMax begin at position 0 again for every call with a cache, unless position_ids are given.
#
# torch 2.13.0, transformers 5.24.0. position_ids are optional, and models derive them from the length of the cache. In
# these hybrids the first layer keeps a recurrent state and no keys; its length counts as that of the whole cache. So a
# loop of one token after the other is wrong from the second call on, without an error; generate(), which gives
# positions, is right.
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
from transformers import AutoModelForCausalLM, BambaConfig, LlamaConfig, MiniMaxConfig

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "initializer_range": 0.4}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
layers = ["linear_attention", "full_attention"]
experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
configs = [
    LlamaConfig(**sizes),
    BambaConfig(attn_layer_indices=[1], **sizes, **mamba),
    MiniMaxConfig(layer_types=layers, head_dim=8, block_size=16, **sizes, **experts),
]
ids = torch.randint(3, 50, (1, 12))

for config in configs:
    model = AutoModelForCausalLM.from_config(config).eval()
    errors = []
    for given in (False, True):
        cache = None
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits[:, -1]
            for index in range(12):
                positions = {"position_ids": torch.tensor([[index]])} if given else {}
                output = model(ids[:, index : index + 1], cache=cache, use_cache=True, **positions)
                cache = output.cache
        errors.append(float((output.logits[:, -1] - whole).abs().max() / whole.abs().max()))
    name = type(model).__name__
    print(f"{name}: token by token off by {errors[0]:.1e} without position_ids, {errors[1]:.1e} with them")
    assert errors[1] < 1e-4
    assert (errors[0] < 1e-4) if name.startswith("Llama") else (errors[0] > 0.02), f"{name} behaves differently now."
PYTHON
