#!/usr/bin/env bash
# Falcon with alibi=True adds its position bias twice in eager attention, once in sdpa.
#
# torch 2.13.0, transformers 5.24.0. Eager attention gets the bias within the attention mask, and adds it to the logits
# once more. The reference below computes one layer from its weights, by the formula of ALiBi: sdpa agrees with it.
# Whoever asks for attention weights, which sdpa does not give, gets them from the other function.
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
from transformers import AutoModel, FalconConfig

transformers.logging.set_verbosity_error()
heads, width, length = 4, 32, 12
ids = torch.arange(3, 3 + length)[None]
options = {"vocab_size": 50, "hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": heads}
options |= {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "initializer_range": 0.4}
options["parallel_attn"] = True


def attention_output(name):
    torch.manual_seed(0)
    model = AutoModel.from_config(FalconConfig(**options), attn_implementation=name).eval()
    seen = {}
    block = model.h[0].self_attention
    block.register_forward_hook(lambda _, args, kwargs, out: seen.update(x=args[0], out=out[0]), with_kwargs=True)
    with torch.no_grad():
        model(ids, use_cache=False)
    return block, seen["x"], seen["out"]


block, x, sdpa = attention_output("sdpa")
_, _, eager = attention_output("eager")


def reference(times):
    """Softmax of q·k / √d plus `times` the ALiBi bias / √d, in float64 from the weights of the layer."""
    with torch.no_grad():
        qkv = block.query_key_value(x).double().view(length, heads, 3, width // heads)
        query, key, value = qkv.permute(2, 1, 0, 3)
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)
        bias = slopes[:, None, None] * torch.arange(length)
        logits = (query @ key.transpose(1, 2) + times * bias) / (width // heads) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        return block.dense(mixed.transpose(0, 1).reshape(1, length, width).float())


errors = {}
for name, out in (("sdpa", sdpa), ("eager", eager)):
    for times in (1, 2):
        errors[name, times] = float((out - reference(times)).abs().max() / out.abs().max())
print({f"{name}, bias {times} times": f"{error:.1e}" for (name, times), error in errors.items()})
assert errors["sdpa", 1] < 1e-4 < 0.01 < errors["sdpa", 2]
assert errors["eager", 2] < 1e-4 < 0.01 < errors["eager", 1], "Eager attention adds the bias once now."
PYTHON
