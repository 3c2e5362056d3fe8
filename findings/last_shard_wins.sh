#!/usr/bin/env bash
# A tensor that stands in two shards is loaded from the last file, whatever the index says.
#
# torch 2.13.0, transformers 5.24.0, safetensors 0.8.0. model.safetensors.index.json names one shard for each tensor, and
# from_pretrained reads all tensors of all shards. A leftover in a later shard (of a merge, or of a new version that was
# saved in fewer files over an old one) replaces the tensor that the index names, without a warning.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 safetensors==0.8.0
"$work/venv/bin/python" - <<'PYTHON'
import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
twice, last = "model.norm.weight", "lm_head.weight"
loaded = {}
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in weights.items() if name not in (twice, last)}
    for named in shards:
        for shard, tensors in zip(shards, (first, {last: weights[last]}), strict=True):
            value = 3.0 if shard == named else 7.0
            save_file({**tensors, twice: torch.full((32,), value)}, folder / shard, metadata={"format": "pt"})
        index = {name: shards[0] for name in weights} | {last: shards[1], twice: named}
        content = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(content)
        loaded[named] = AutoModelForCausalLM.from_pretrained(folder).model.norm.weight[0].item()
print(f"The index names a shard with 3.0, the other one has 7.0. Loaded: {loaded}")
assert loaded == {shards[0]: 7.0, shards[1]: 3.0}, "The index decides now."
PYTHON
