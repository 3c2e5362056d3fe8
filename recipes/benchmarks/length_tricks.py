"""Do tricks of other papers mend what a converted decoder loses beyond the length of its training rows?

    python -m recipes.benchmarks.length_tricks MODEL --train TRAIN.txt --test TEST.txt --out FILE.json

Each variant of `window` is one trick, trained by distillation on the same rows as its controls:

- exact: the model with exact attention, trained with the same steps;
- near: windows and sinks with nothing outside of them;
- wider: `window` with windows of twice the size;
- window: the mechanism as it is, whose part outside of the window saturates with the number of tokens there;
- unsaturated: the same without saturation;
- decay: outside of the window a weight falls with the distance as `exp(-λ (i - j))`. λ is learned, a number per head,
  and starts where each head looks back: at half of its weight at its mean distance in exact attention (as in
  arXiv:2606.16429). The number of tokens that saturates is the decayed one;
- convolution: the feature map sees each key with its three predecessors, by a learned depthwise filter that starts at
  zero (LAWCAT);
- unrotated: the feature map sees queries and keys without their rotary positions (LAWCAT, Lizard);
- state-passing: rows start from the detached state after up to three rows of text before them (arXiv:2507.02782);
- store: `window` as trained, with room for the keys of each head whose values its state recalls worst: as many exact
  weights as the window has (LoLA, arXiv:2505.23666). Nothing is trained for it.

Measured on held-out text of four times the rows' length: the loss by position, and pass keys, of which every token of
the answer must be the most likely one after those before it. The variants compute their weights explicitly, in blocks.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.recall_prompts import TASKS, PromptMaker
from hf_linear_attn.data.text import packed_rows
from hf_linear_attn.feature_maps.base import AttentionShape, option
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.mechanisms.window import WindowAttention, WindowOptions
from hf_linear_attn.ops.calls import AttentionInputs
from hf_linear_attn.training.losses import logits_loss
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json

#: Queries whose weights are in memory at a time; also how often a store takes up keys.
BLOCK = 64
#: Earlier keys that the convolution mixes in.
TAPS = 3
#: Lengths of the text in which losses are reported, in rows of training.
SPANS = ((0, 1), (1, 2), (2, 4))
VARIANTS = (
    "exact", "near", "window", "wider", "unsaturated", "decay", "convolution", "unrotated", "state-passing", "store",
)  # fmt: skip


class TrickOptions(WindowOptions):
    trick: str = option("", "one of the variants")
    rotary_base: float = option(10000.0, "base of the model's rotary positions")


@hla.register_attention(
    "window-trick",
    description="a window with one trick, by explicit weights",
    paper="see recipes/benchmarks/length_tricks.py",
    options=TrickOptions,
    bidirectional=False,
    learned=True,
    state="none",
    cost="O(L²·d)",
)
class TrickAttention(WindowAttention):
    """`w_ij = exp(τ q·k - c_i)` in the window and for sinks, `exp(g_i - λ (i - j)) φ(q'_i)·φ(k'_j)` elsewhere."""

    options: TrickOptions

    def __init__(self, shape: AttentionShape, options: TrickOptions) -> None:
        super().__init__(shape, options)
        self.calibrating = False
        if options.trick == "decay":
            self.log_rate = nn.Parameter(torch.zeros(shape.num_heads))
        if options.trick == "convolution":
            self.filter = nn.Parameter(torch.zeros(shape.num_key_value_heads, TAPS, 1, shape.head_dim))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, None]:
        self.begin_forward(inputs)
        query, key, value = inputs.tensors
        repeats = query.shape[1] // key.shape[1]
        features = self._features(*self._seen_by_map(query, key), inputs.scaling)
        stored = self._stored(features[1], value) if self.options.trick == "store" else None
        if self.calibrating:
            return self._calibrate(inputs), None
        gates = self._log_mix(inputs)
        key, value, far_keys = (x.repeat_interleave(repeats, dim=1) for x in (key, value, features[1]))
        blocks = []
        for start in range(0, query.shape[2], BLOCK):
            stop = min(start + BLOCK, query.shape[2])
            part = replace(inputs, query=query[:, :, start:stop], key=inputs.key[:, :, :stop])
            exact, visible = self._inside(part), part.visible()
            if stored is not None:
                exact = exact | stored[start // BLOCK][None, :, None, :stop].repeat_interleave(repeats, dim=1)
            arguments = (part.query * inputs.scaling, key[:, :, :stop], value[:, :, :stop])
            arguments += (features[0][:, :, start:stop], far_keys[:, :, :stop], gates[:, :, start:stop])
            call: Any = checkpoint if torch.is_grad_enabled() else lambda run, *args, **_: run(*args)
            blocks.append(call(self._block, *arguments, exact & visible, visible, use_reentrant=False))
        return torch.cat(blocks, dim=2), None

    def _block(self, *tensors: Tensor) -> Tensor:
        query, key, value, far_query, far_key, gate, exact, visible = tensors
        logits = (query @ key.transpose(-1, -2)).masked_fill(~exact, float("-inf"))
        top = logits.amax(dim=-1, keepdim=True).detach()
        far = far_query @ far_key.transpose(-1, -2) * gate.exp().unsqueeze(-1)
        if self.options.trick == "decay":
            length, keys = far.shape[-2:]
            positions = torch.arange(keys)
            distance = positions[-length:, None] - positions
            far = far * (-self.log_rate.exp().view(-1, 1, 1) * distance.clamp_min(0)).exp()
        weights = (logits - top).exp() + far.masked_fill(exact | ~visible, 0.0)
        return weights @ value / weights.sum(dim=-1, keepdim=True)

    def _features(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return self.feature_map.query(query, scaling).values, self.feature_map.key(key, scaling).values

    def _seen_by_map(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.trick == "convolution":
            taps = (functional.pad(key, (0, 0, 1 + tap, 0))[:, :, : key.shape[2]] for tap in range(TAPS))
            key = key + sum(self.filter[:, tap] * shifted for tap, shifted in enumerate(taps))
        if self.options.trick == "unrotated":
            query, key = (unrotate(x, self.options.rotary_base) for x in (query, key))
        return query, key

    def _constant_mix(self, inputs: AttentionInputs) -> Tensor:
        if self.options.trick != "decay":
            return super()._constant_mix(inputs)
        rate = self.log_rate.exp().view(1, -1, 1)
        decayed = (1 - (-rate * self._count_outside(inputs).unsqueeze(1)).exp()) / (1 - (-rate).exp())
        return self.log_mix.view(1, -1, 1) - torch.log1p(decayed / float(self.options.saturation or 1))

    def _calibrate(self, inputs: AttentionInputs) -> Tensor:
        """Return exact attention, and let the decay start from its mean distance outside of the window."""
        query, key, value = inputs.tensors
        repeats = query.shape[1] // key.shape[1]
        logits = (query * inputs.scaling) @ key.repeat_interleave(repeats, dim=1).transpose(-1, -2)
        visible = inputs.visible()
        weights = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        positions = torch.arange(key.shape[2])
        distance = (positions[:, None] - positions).clamp_min(0)
        far = weights.masked_fill(self._inside(inputs), 0.0)
        mean = (far * distance).sum(dim=(0, 2, 3)) / far.sum(dim=(0, 2, 3)).clamp_min(1e-9)
        self.log_rate.data = (math.log(2) / mean.clamp_min(1.0)).log()
        return weights @ value.repeat_interleave(repeats, dim=1)

    def _stored(self, features: Tensor, value: Tensor) -> list[Tensor]:
        """Return for each block of queries which keys its store holds, `[G, S]`; for one row of text."""
        groups, keys, size = value.shape[1], value.shape[2], self.options.window_size
        phi, v = features[0], value[0]
        kv, total = phi.new_zeros(groups, phi.shape[-1], v.shape[-1]), phi.new_zeros(groups, phi.shape[-1])
        held = torch.zeros(groups, keys, dtype=torch.bool)
        masks = []
        for start in range(0, keys, BLOCK):
            # Before a block is read, the keys that have left the windows of all its queries may enter.
            new = torch.arange(max(start - BLOCK - size, 0), max(start - size, 0))
            candidates = held.clone()
            candidates[:, new[new >= int(self.options.sink_tokens)]] = True
            weight = torch.einsum("gsm,gm->gs", phi, total).clamp_min(1e-9)
            recalled = torch.einsum("gsm,gme->gse", phi, kv) / weight[..., None]
            error = (recalled - v).norm(dim=-1).masked_fill(~candidates, -1.0)
            kept = torch.zeros_like(held).scatter(1, error.topk(min(size, keys), dim=1).indices, True) & candidates
            leaving = (candidates & ~kept).to(phi.dtype)
            kv = kv + torch.einsum("gs,gsm,gse->gme", leaving, phi, v)
            total = total + torch.einsum("gs,gsm->gm", leaving, phi)
            held = kept
            masks.append(held)
        return masks


def unrotate(x: Tensor, base: float) -> Tensor:
    """Undo the rotary positions of `[B, H, L, d]`, whose first token is at position 0."""
    width = x.shape[-1]
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = (torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency).repeat(1, 2)
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], dim=-1)
    return x * angle.cos().to(x.dtype) - half * angle.sin().to(x.dtype)


def build(exact: PreTrainedModel, variant: str, window: int, row: Tensor) -> PreTrainedModel:
    """Return the model of a variant, untrained."""
    model = copy.deepcopy(exact)
    options: dict[str, Any] = {"window_size": window, "mix_init": -2.0}
    if variant == "exact":
        return model
    if variant == "state-passing":
        return hla.patch_model(model, "window", **options)
    base = (getattr(model.config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    options |= {"trick": variant, "rotary_base": base}
    if variant == "near":
        options["mix_init"] = -30.0
    if variant == "wider":
        options["window_size"] = 2 * window
    if variant == "unsaturated":
        options |= {"saturation": None, "mix_init": -2.0 - math.log(8)}
    hla.patch_model(model, "window-trick", **options)
    if variant == "decay":
        set_calibrating(model, True)
        with torch.no_grad():
            model(row, use_cache=False)
        set_calibrating(model, False)
    return model


def set_calibrating(model: PreTrainedModel, calibrating: bool) -> None:
    for module in attention_modules(model):
        module.linear_attention.calibrating = calibrating


def training_rows(tokens: Sequence[int], length: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a row of text, and the up to three rows of text before it."""
    rng = random.Random(seed)
    for _ in range(steps):
        start = rng.randrange(3 * length, len(tokens) - length)
        before = rng.randrange(4) * length
        yield torch.tensor([tokens[start : start + length]]), torch.tensor([tokens[start - before : start]])


def train(model: PreTrainedModel, exact: PreTrainedModel, variant: str, rows: Any, options: argparse.Namespace) -> None:
    """Distil the logits of the exact model, whose context is the same as the variant's."""
    mechanisms: list[Any] = [module.linear_attention for module in attention_modules(model)]
    learned = {id(parameter) for mechanism in mechanisms for parameter in mechanism.parameters()}
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        parts[id(parameter) in learned].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": parts[False], "lr": options.lr}, {"params": parts[True], "lr": options.learned_lr}],
        weight_decay=0.0,
    )
    warm = max(options.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * step / options.steps)),
    )
    for step, (row, before) in enumerate(rows):
        state: dict[str, Any] = {"use_cache": False}
        context = row
        with torch.no_grad():
            if variant == "state-passing" and before.shape[1]:
                state = {"past_key_values": model(before, use_cache=True).past_key_values}
                context = torch.cat([before, row], dim=1)
            expected = exact(context, use_cache=False, logits_to_keep=row.shape[1]).logits[0]
        loss = logits_loss(model(row, **state).logits[0], expected, 1.0) / row.shape[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 8 == 7:
            options.console.print(f"{variant}, step {step + 1}: {loss.item():.3f}")


@torch.no_grad()
def measure(model: PreTrainedModel, tokenizer: Any, tokens: Sequence[int], options: argparse.Namespace) -> dict:
    length, context = options.length, 4 * options.length
    losses = []
    for start in range(0, options.test_rows * context, context):
        row = torch.tensor([tokens[start : start + context]])
        logits = model(row, use_cache=False).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, row[0, 1:], reduction="none"))
    mean = torch.stack(losses).double().mean(dim=0)
    by_span = {
        f"{a * length}-{b * length}": mean[max(a * length - 1, 0) : b * length - 1].mean().item() for a, b in SPANS
    }
    maker, recalled = PromptMaker(tokenizer, model.config.vocab_size), {}
    for size in (length, 2 * length, context):
        right = []
        for depth in (0.1, 0.5, 0.9):
            for trial in range(options.trials):
                prompt = TASKS["pass_key"](maker, random.Random(f"{size} {depth} {trial}"), size, depth)
                ids = torch.tensor([prompt.ids + prompt.answer])
                kept = len(prompt.answer) + 1
                best = model(ids, use_cache=False, logits_to_keep=kept).logits[0, :-1].argmax(dim=-1)
                right.append(best.tolist() == prompt.answer)
        recalled[str(size)] = sum(right) / len(right)
    return {"loss": mean.mean().item(), "loss_by_position": by_span, "pass_key": recalled}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a decoder")
    parser.add_argument("--train", required=True, type=Path, help="text file")
    parser.add_argument("--test", required=True, type=Path, help="text file")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row of training")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--learned_lr", type=float, default=3e-3)
    parser.add_argument("--test_rows", type=int, default=8, help="rows of four times the length")
    parser.add_argument("--trials", type=int, default=2, help="pass keys for each length and depth")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    options.console = Console()
    exact = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = (text_documents(Path(path)) for path in (options.train, options.test))
    tokens, held_out = ([token for row in packed_rows(tokenizer, text, 2**20) for token in row] for text in texts)
    settings = {k: v for k, v in vars(options).items() if k not in ("console", "out", "train", "test", "variants")}
    settings["model"] = Path(options.model).name
    facts = {"format_version": 1, "settings": settings, "environment": environment(torch.device("cpu"))}
    rows = [{"variant": "as given", "seed": None, **measure(exact, tokenizer, held_out, options)}]
    options.console.print(rows[0])
    for seed in options.seeds:
        trained: PreTrainedModel | None = None
        for variant in options.variants:
            torch.manual_seed(seed)
            began = time.perf_counter()
            if variant == "store":
                if trained is None:
                    parser.error("store needs window before it")
                model = build(exact, variant, options.window, torch.empty(0))
                model.load_state_dict(trained.state_dict())
            else:
                row = torch.tensor([tokens[: options.length]])
                model = build(exact, variant, options.window, row)
                train(model, exact, variant, training_rows(tokens, options.length, options.steps, seed), options)
            trained = model if variant == "window" else trained
            seconds = time.perf_counter() - began
            rows.append(
                {"variant": variant, "seed": seed, "seconds": seconds, **measure(model, tokenizer, held_out, options)}
            )
            options.console.print(rows[-1])
            write_json(options.out, {**facts, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
