#!/usr/bin/env bash
# Nystromformer takes landmarks from other rows of a batch where rows are short, and refuses a mask of padding.
#
# torch 2.13.0, transformers 5.24.0. The landmarks are means over segments whose length comes from
# config.segment_means_seq_len, reshaped with a free batch dimension. A batch of 2 rows of 32 tokens then passes for one
# row of 64: its landmarks run across rows and heads and are shared by both rows (another second row changes the first
# by 28 %), without a warning; one row of 32 raises. Rows of the full length depend on each other, too: the inverse
# starts from the largest sum of the whole batch. And a row of 64 with padding, whose mask is a square since it comes
# from the common mask functions, raises a RuntimeError. With as many landmarks as tokens, where attention is exact (the
# default config), all of this is right.
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
from transformers import NystromformerConfig, NystromformerModel

transformers.logging.set_verbosity_error()
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
seen = {}
for landmarks in (8, 64):
    torch.manual_seed(0)
    config = NystromformerConfig(
        vocab_size=50, segment_means_seq_len=64, num_landmarks=landmarks, initializer_range=0.3, **sizes
    )
    model = NystromformerModel(config).eval()
    ids = torch.randint(3, 50, (2, 64))
    other = torch.cat([ids[:1], torch.randint(3, 50, (1, 64))])  # the second row is another one

    def try_out(tokens, mask=None):
        try:
            with torch.no_grad():
                model(tokens, attention_mask=mask)
        except RuntimeError:
            return "RuntimeError"
        return "runs"

    changes = []
    for length in (32, 64):
        with torch.no_grad():
            before, after = (model(tokens[:, :length])[0][0] for tokens in (ids, other))
        changes.append(float((before - after).norm() / before.norm()))
    one = try_out(ids[:1, :32])
    padded = try_out(ids[:1], (torch.arange(64) < 40).long()[None])
    print(f"{landmarks} landmarks: another second row changes the first by {changes[0]:.4f} (rows of 32) and ", end="")
    print(f"{changes[1]:.4f} (rows of 64); one row of 32: {one}; a padded row of 64: {padded}")
    seen[landmarks] = changes, one, padded
changes, *errors = seen[8]
assert changes[0] > 0.05 and changes[1] > 1e-4 and errors == ["RuntimeError"] * 2, "This has changed."
changes, *errors = seen[64]
assert max(changes) < 1e-5 and errors == ["runs"] * 2, seen[64]
PYTHON
