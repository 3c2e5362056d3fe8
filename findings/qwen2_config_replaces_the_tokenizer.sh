#!/usr/bin/env bash
# AutoTokenizer turns a saved word-level tokenizer beside a Qwen2 config into a Qwen2Tokenizer, which reads no word at all.
#
# torch 2.13.0, transformers 5.24.0. `save_pretrained` writes the class of the tokenizer, TokenizersBackend, into
# tokenizer_config.json. With a config of model type qwen2 in the same folder that class is set aside: the vocabulary
# becomes that of a byte-level BPE without merges, and a text of known words is an empty list of tokens, without a
# warning. Beside configs of Qwen3, Llama and Mistral the same files are read as they were saved. PreTrainedTokenizerFast
# reads them rightly beside Qwen2, too.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache TRANSFORMERS_VERBOSITY=error
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

words = Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "green": 2, "blue": 3}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
saved = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

seen = {}
for config in (Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig):
    folder = Path(config.model_type)
    saved.save_pretrained(folder)
    config().save_pretrained(folder)
    read = AutoTokenizer.from_pretrained(folder)
    seen[config.model_type] = read("red green blue").input_ids
    print(f"{config.model_type}: {type(read).__name__} reads {seen[config.model_type]}")
by_class = PreTrainedTokenizerFast.from_pretrained("qwen2")("red green blue").input_ids
print(f"qwen2 by PreTrainedTokenizerFast: {by_class}")
assert by_class == seen["qwen3"] == seen["llama"] == seen["mistral"] == [1, 2, 3]
assert seen["qwen2"] == [], "AutoTokenizer reads the saved tokenizer beside a Qwen2 config now."
PYTHON
