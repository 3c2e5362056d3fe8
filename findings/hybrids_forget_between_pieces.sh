#!/usr/bin/env bash
# Jamba, Mamba and FalconMamba forget their state before a second piece of several tokens, without an error.
#
# torch 2.13.0, transformers 5.24.0. A prompt read in two pieces (chunked prefill, a chat whose next turn is appended to
# the cache) gives other logits than the whole prompt: state and convolution start anew. One token at a time is right, so
# is generate(). Mamba2, FalconH1, LFM2 and Qwen3-Next carry theirs on.
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
from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
decoder = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
decoder["num_key_value_heads"] = 2
ssm = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}
forget = {
    "Jamba": {**decoder, **jamba, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "Mamba": ssm,
    "FalconMamba": ssm,
}
carry = {
    "Mamba2": {**ssm, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "FalconH1": {**decoder, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "Lfm2": {**decoder, "full_attn_idxs": [1]},
    "Qwen3Next": {**decoder, **experts, **linear, "num_hidden_layers": 4, "head_dim": 8},
}
ids = torch.randint(3, 50, (1, 12))


def error_in_pieces(model, size):
    """Return how far the last logits are from those of the whole prompt, relative to the largest."""
    cache = None
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, -1]
        for start in range(0, 12, size):
            positions = torch.arange(start, start + size)[None]
            inputs = {} if "Mamba" in type(model).__name__ else {"position_ids": positions}
            output = model(ids[:, start : start + size], cache=cache, use_cache=True, **inputs)
            cache = output.cache
    return float((output.logits[:, -1] - whole).abs().max() / whole.abs().max())


for name, options in {**forget, **carry}.items():
    config = getattr(transformers, f"{name}Config")(vocab_size=50, initializer_range=0.4, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    pieces, tokens = error_in_pieces(model, 6), error_in_pieces(model, 1)
    print(f"{name}: two pieces of 6 tokens off by {pieces:.1e}, single tokens by {tokens:.1e}")
    assert tokens < 1e-4
    assert (pieces > 0.01) if name in forget else (pieces < 1e-4), f"{name} behaves differently now."
PYTHON
