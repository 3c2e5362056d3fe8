#!/usr/bin/env bash
# transformers serve: a request's temperature is accepted and has no effect, and its seed is the seed of all requests.
#
# torch 2.13.0, transformers 5.24.0 with its extra "serving". OpenAI's interface samples unless temperature is 0. The
# server copies temperature into the generation config and leaves do_sample as the checkpoint has it (off where its
# generation_config.json says nothing), so every answer is the greedy one, whatever temperature and seed are asked for.
# The seed goes to torch.manual_seed of the process. With do_sample in the checkpoint, temperature works.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 HF_HOME=$work/cache TRANSFORMERS_VERBOSITY=error
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
pip install --quiet torch==2.13.0 'transformers[serving]==5.24.0'
cd "$work"
python - <<'PYTHON'
import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, eos_token_id=None, initializer_range=0.3, **sizes))
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(32)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def ask(port, **options):
    body = {"model": "PATH", "prompt": "w1 w2 w3", "max_tokens": 12, **options}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def answers(folder, do_sample):
    model.generation_config.do_sample = do_sample
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(Path(folder).absolute())
    command = ["transformers", "serve", path, "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            greedy = ask(port, model=path, temperature=0)
            return greedy, {ask(port, model=path, temperature=2.0, seed=seed) for seed in range(5)}
        finally:
            server.kill()


greedy, asked = answers("plain", None)
print(f"do_sample not set: {len(asked)} answer(s) to 5 seeds at temperature 2, the greedy one: {asked == {greedy}}")
assert asked == {greedy}, "The server samples at a temperature now."
greedy, asked = answers("sampling", True)
print(f"do_sample in the checkpoint: {len(asked)} answers to 5 seeds at temperature 2")
assert len(asked) == 5
PYTHON
