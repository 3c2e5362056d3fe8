#!/usr/bin/env bash
# BigBird in evaluation reads its first block in place of its random ones, once more for each; and training reseeds NumPy.
#
# torch 2.13.0, transformers 5.24.0. The blocks that block-sparse attention draws at random are drawn in training mode
# alone. In evaluation each of them is block 0, which is global and read anyway: with num_random_blocks=3 its tokens
# weigh four times what others of equal logits do, and no far block is read. So a model is evaluated with another
# attention than it was trained with, and outputs of training mode, without dropout, are not those of evaluation. Each
# forward pass in training mode also seeds NumPy's global generator anew, so what a program draws from it between passes
# (an augmentation, the next rows) is the same each time. No warning.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
unset PYTHONPATH PYTHONHOME

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$work/venv/bin/python" - <<'PYTHON'
import numpy
import torch
import transformers
from transformers import BigBirdConfig, BigBirdModel

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
size, blocks = 16, 16
ids = torch.randint(3, 50, (1, blocks * size))
block_of_token = torch.eye(blocks).repeat_interleave(size, 0)[None]
seen = {}
for drawn in (1, 2, 3):
    config = BigBirdConfig(
        vocab_size=50, hidden_size=blocks, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        block_size=size, num_random_blocks=drawn, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, sep_token_id=2,
    )
    model = BigBirdModel(config)
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():  # all logits are equal, and a value names its block: the output says how often each was read
        for part in (attention.query, attention.key, attention.value):
            part.weight.zero_()
            part.bias.zero_()
        attention.value.weight.copy_(torch.eye(blocks))
    outputs = []
    attention.register_forward_pre_hook(lambda module, arguments: (block_of_token, *arguments[1:]))
    attention.register_forward_hook(lambda module, arguments, output: outputs.append(output[0]))
    for training in (True, False):
        numpy.random.seed(1)
        model.train(training)
        numbers = []
        for _ in range(3):
            with torch.no_grad():
                model(ids)
            numbers.append(int(numpy.random.randint(1000)))
        times = (outputs[-1][0, 8 * size] * (5 + drawn)).round().int().tolist()  # the block in the middle
        mode = "training" if training else "evaluation"
        print(f"{drawn} random, {mode}: reads of blocks 0 to 15: {times}, NumPy then draws {numbers}")
        seen[drawn, training] = times[0], len(set(numbers))
for (drawn, training), (first, different) in seen.items():
    assert (first, different == 1) == ((1, True) if training else (1 + drawn, False)), "This has changed."
PYTHON
