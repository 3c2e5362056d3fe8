#!/usr/bin/env bash
# Transformers: GPT-2 in training mode with gradient checkpointing generates from the last token alone.
#
# Packages: torch 2.13.0, transformers 5.24.0 (with Python 3.11 on a CPU).
# generate() runs without gradients, so that nothing is checkpointed; 5.24 keeps the cache of a Llama then. GPT-2 still
# leaves its cache out, while generate() hands it one token after the other: all tokens from the second on are wrong,
# without an error. All dropout is 0 here. Expected: the tokens of use_cache=False, as for a Llama.
#
# Exits with 0 while this is so, and with 1 once it is otherwise.
set -euo pipefail
unset PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore

python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$work"

cat >expected.txt <<'TEXT'
Llama: the same tokens
GPT2: the first token is the same, others differ
TEXT

python - >output.txt <<'PYTHON'
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ids = torch.arange(5, 17)[None]
settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
for model_class, config in (
    (LlamaForCausalLM, LlamaConfig(**sizes, intermediate_size=32, initializer_range=0.3)),
    (GPT2LMHeadModel, GPT2Config(**sizes, **no_dropout, initializer_range=0.3)),
):
    torch.manual_seed(1)
    model = model_class(config)
    model.gradient_checkpointing_enable()
    model.train()
    expected, actual = (model.generate(ids, use_cache=use, **settings)[0, 12:] for use in (False, True))
    same = (expected == actual).tolist()
    texts = {True: "the same tokens", False: "the first token is the same, others differ" if same[0] else "others"}
    print(f"{config.model_type.replace('gpt2', 'GPT2').replace('llama', 'Llama')}: {texts[all(same)]}")
PYTHON

cat output.txt
diff expected.txt output.txt || { echo "The behaviour has changed." >&2; exit 1; }
