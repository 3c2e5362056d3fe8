#!/usr/bin/env bash
# Phi-4-multimodal's audio encoder adds its mask of padding to the logits as 1 and 0, so real frames attend to padding.
#
# torch 2.13.0, transformers 5.24.0. The encoder joins a boolean mask and a bias of relative positions by a sum: a real
# key gets + 1, a padded one + 0, and nothing is hidden, in eager attention and sdpa alike. A batch of clips of several
# lengths has such padding, and a clip alone has no mask, so the same clip gets other features beside a longer one,
# without a warning. Below the frames far behind the clip's end change, where no convolution reaches, and the clip's own
# change by 6 %; with the same bias, and a large negative number at padded keys in place of the sum, the clip's own
# frames stay as they are.
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
from transformers import Phi4MultimodalAudioConfig, Phi4MultimodalAudioModel

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
channels = ("hidden_size", "intermediate_size", "ext_pw_out_channel", "depthwise_separable_out_channel")
sizes = dict.fromkeys((*channels, "nemo_conv_channels"), 32)
config = Phi4MultimodalAudioConfig(num_blocks=2, num_attention_heads=4, initializer_range=0.2, **sizes)
model = Phi4MultimodalAudioModel(config).eval()
frames, own = 160, 96  # the encoder makes one frame of eight
clips = torch.randn(1, frames, config.input_size)
moved = clips.clone()
moved[:, own + 40 :] = torch.randn(1, frames - own - 40, config.input_size)
real = (torch.arange(frames) < own)[None]
own //= config.time_reduction


def hide(block, arguments):
    """Keep the sum where the key is real, and hide the others."""
    hidden, mask = arguments
    return hidden, mask.masked_fill(torch.arange(mask.shape[-1]) >= own, torch.finfo(mask.dtype).min)


changes = {}
for hides in (False, True):
    hooks = [block.register_forward_pre_hook(hide) for block in model.encoders if hides]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            before, after = (model(audio, real)[:, :own] for audio in (clips, moved))
        changes[hides, attention] = float((before - after).norm() / before.norm())
        print(f"{attention}, padding really hidden: {hides}: the clip's frames change by {changes[hides, attention]:.3f}")
    for hook in hooks:
        hook.remove()
assert min(changes[False, attention] for attention in ("eager", "sdpa")) > 0.02, "The mask hides padding now."
assert max(changes[True, attention] for attention in ("eager", "sdpa")) < 1e-6, changes
PYTHON
