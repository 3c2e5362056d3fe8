#!/usr/bin/env bash
# Transformers: BART writes the encoder's keys into a DynamicCache of its decoder.
#
# Packages: torch 2.13.0, transformers 5.24.0 (with Python 3.11 on a CPU).
# The type of the argument is Cache. Given a DynamicCache, a BART decoder uses it for self-attention and cross-attention
# alike: each layer's keys of cross-attention are appended to those of self-attention. The outputs are wrong, and there
# is no warning; an EncoderDecoderCache gives those without a cache. Expected: the same outputs, or an error.
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
EncoderDecoderCache: 6 tokens in the cache, outputs as without a cache
DynamicCache: 15 tokens in the cache, other outputs
TEXT

python - >output.txt <<'PYTHON'
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

torch.manual_seed(0)
sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 2, "decoder_layers": 2}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
model = BartForConditionalGeneration(BartConfig(vocab_size=50, init_std=0.3, **sizes, **heads)).eval()
inputs = {"input_ids": torch.arange(5, 14)[None], "decoder_input_ids": torch.arange(5, 11)[None]}
with torch.no_grad():
    expected = model(**inputs, use_cache=False).logits
    for cache in (EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache()):
        difference = float((model(**inputs, cache=cache, use_cache=True).logits - expected).abs().max())
        outputs = "outputs as without a cache" if difference < 1e-4 else "other outputs"
        print(f"{type(cache).__name__}: {cache.get_seq_length()} tokens in the cache, {outputs}")
PYTHON

cat output.txt
diff expected.txt output.txt || { echo "The behaviour has changed." >&2; exit 1; }
