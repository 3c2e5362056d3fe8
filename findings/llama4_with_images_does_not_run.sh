#!/usr/bin/env bash
# Llama4ForConditionalGeneration ends every forward pass in an AttributeError, with text alone, too.
#
# torch 2.13.0, transformers 5.24.0. The model hands on `image_outputs` of its language model's output, which is one of
# a mixture of experts and has no such field. The language model of the same checkpoint (Llama4ForCausalLM) runs, and so
# does the whole in transformers 5.23.0.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache TRANSFORMERS_VERBOSITY=error
unset PYTHONPATH PYTHONHOME

cat >"$work/run.py" <<'PYTHON'
import torch
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
text = {**sizes, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 32, "num_local_experts": 2}
vision = {**sizes, "image_size": 32, "patch_size": 16, "vision_output_dim": 32, "projector_input_dim": 32}
config = Llama4Config(
    text_config={**text, "vocab_size": 64, "pad_token_id": 0},
    vision_config={**vision, "projector_output_dim": 32},
)
ids = torch.arange(5, 13)[None]
whole, decoder = Llama4ForConditionalGeneration(config).eval(), Llama4ForCausalLM(config.text_config).eval()
with torch.no_grad():
    print("the language model:", tuple(decoder(input_ids=ids).logits.shape))
    try:
        print("the whole:", tuple(whole(input_ids=ids).logits.shape))
    except AttributeError as error:
        print("the whole: AttributeError:", error)
PYTHON

for version in 5.24.0 5.23.0; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
  echo "transformers $version"
  (cd "$work" && "$work/$version/bin/python" run.py)
done | tee "$work/output.txt"

diff - "$work/output.txt" <<'TEXT' || { echo "The behaviour has changed." >&2; exit 1; }
transformers 5.24.0
the language model: (1, 8, 64)
the whole: AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'
transformers 5.23.0
the language model: (1, 8, 64)
the whole: (1, 8, 64)
TEXT
