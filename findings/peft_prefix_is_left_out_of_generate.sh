#!/usr/bin/env bash
# PEFT: generate() of a prefix-tuned model leaves out the prefix, which forward() reads.
#
# Packages: torch 2.13.0, transformers 5.24.0, peft 0.21.2 (with Python 3.11 on a CPU).
# PEFT hands the prefix to Transformers as past_key_values. Since 5.24 generate() passes a cache of its own by the new
# name, `cache`, which wins: a FutureWarning says that the deprecated one is ignored. So the tokens are those of the base
# model. Expected: the first token's logits of generate() are those of forward().
#
# Exits with 0 while this is so, and with 1 once it is otherwise.
set -euo pipefail
unset PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore

python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"

cat >expected.txt <<'TEXT'
forward() minus generate(): large
base model minus generate(): rounding
TEXT

python - >output.txt <<'PYTHON'
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.3, **sizes))
model = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
for name, parameter in model.named_parameters():
    if "prompt" in name:  # as if it had been trained
        torch.nn.init.normal_(parameter, std=3.0)

inputs = {"input_ids": torch.arange(5, 14)[None], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
settings = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
with torch.no_grad():
    forward = model(**inputs).logits[:, -1]
generated = model.generate(**inputs, **settings).logits[0]
with model.disable_adapter():
    base = model.generate(**inputs, **settings).logits[0]
for label, logits in (("forward()", forward), ("base model", base)):
    difference = float((logits - generated).abs().max())
    print(f"{label} minus generate(): {'large' if difference > 0.1 else 'rounding' if difference < 1e-4 else difference}")
PYTHON

cat output.txt
diff expected.txt output.txt || { echo "The behaviour has changed." >&2; exit 1; }
