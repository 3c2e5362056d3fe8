#!/usr/bin/env bash
# Transformers: without a cache Whisper returns more timestamps than tokens.
#
# Packages: torch 2.13.0, transformers 5.24.0 (with Python 3.11 on a CPU).
# return_token_timestamps=True gives each token a time. With use_cache=False the cross-attention of every step has rows
# for all tokens so far; they are joined as if they were those of one token each. Expected: a time for each token, the
# same with and without a cache.
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
use_cache=True: 12 tokens, 12 times
use_cache=False: 12 tokens, 66 times
TEXT

python - >output.txt <<'PYTHON'
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
sizes = {"vocab_size": 80, "d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 8}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
lengths = {"max_source_positions": 30, "max_target_positions": 40}
model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens, **lengths, init_std=0.25)).eval()
generation = model.generation_config
generation.alignment_heads, generation.no_timestamps_token_id, generation.is_multilingual = [[0, 0], [1, 1]], 70, False
generation.suppress_tokens = generation.begin_suppress_tokens = None
audio = {"input_features": torch.randn(1, 8, 60), "attention_mask": torch.ones(1, 60, dtype=torch.long)}
for use_cache in (True, False):
    settings = {"return_token_timestamps": True, "return_dict_in_generate": True, "use_cache": use_cache}
    result = model.generate(**audio, **settings, max_new_tokens=10, do_sample=False)
    sizes = result["sequences"].shape[1], result["token_timestamps"].shape[1]
    print(f"use_cache={use_cache}: {sizes[0]} tokens, {sizes[1]} times")
PYTHON

cat output.txt
diff expected.txt output.txt || { echo "The behaviour has changed." >&2; exit 1; }
