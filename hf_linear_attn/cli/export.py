"""`hf-linear-attn export`."""

import sys

from ..exporting import ExportConfig, export
from .verb import Verb


def run(config: ExportConfig) -> None:
    sys.stdout.write(f"{export(config)}\n")


VERB = Verb(
    "export a patched checkpoint to ONNX, OpenVINO or torch.export, with a free batch and length",
    ExportConfig,
    run,
    ("model", "output"),
    """\
hf-linear-attn export out onnx-out
hf-linear-attn export out openvino-out --format openvino
hf-linear-attn export out pt2-out --format torch

A model that generates becomes two graphs: one for the prompt, one for each token after it.""",
)
