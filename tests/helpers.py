"""Tiny models by family, the registry as test cases, one tolerance table, and comparisons."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape, FeatureMap
from hf_linear_attn.mechanisms import LinearAttention
from hf_linear_attn.mechanisms.softmax import EXACT
from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS, AttentionEntry, build_options

#: Largest relative error `max|a - b| / max|b|` that two ways to the same number may differ by.
TOLERANCE = {
    torch.float64: 1e-10,  # 2^-53 = 1e-16, times some 1e3 additions, exponentials and a division by small sums
    torch.float32: 2e-5,  # 2^-24 = 6e-8, times the same: the fast forms add in another order than the definition
    torch.float16: 5e-3,  # 2^-11 = 5e-4 for each rounded tensor between the layers; sums are kept in float32
    torch.bfloat16: 4e-2,  # 2^-8 = 4e-3 for each rounded tensor between the layers; sums are kept in float32
}
#: Gradients pass every operation twice and cancel more.
GRADIENT_FACTOR = 10.0

#: Options that make a mechanism approximate on a handful of tokens, by option name: whatever has one gets it.
SMALL_OPTIONS: dict[str, Any] = {
    "num_features": 24,
    "window_size": 4,
    "sink_tokens": 2,
    "block_size": 4,
    "slots_per_block": 2,
    "num_slots": 5,
    "num_packed": 5,
    "num_landmarks": 5,
}

VOCABULARY = 61
MAX_LENGTH = 96

# --------------------------------------------------------------------------------------------------------------------
# Tiny models and their tokenizer

#: initializer_range is ten times the usual: with 0.02 every attention is uniform and the tests would prove nothing.
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.25}

#: What every architecture gets whose config has such a field, by its standard name.
STANDARD_SIZES: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": MAX_LENGTH,
}
_DECODER_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_ENCODER_DECODER_SIZES: dict[str, Any] = {
    "init_std": 0.25,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
}

#: Architecture -> fields that the standard sizes do not cover.
ARCHITECTURE_FIELDS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bart": {**_ENCODER_DECODER_SIZES, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    | {"bos_token_id": 1, "forced_eos_token_id": None},
    "distilbert": {"hidden_dim": 40},
    "electra": {"embedding_size": 16},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "gpt2": _DECODER_TOKENS,
    "llama": {**_DECODER_TOKENS, "num_key_value_heads": 2, "attention_bias": True},
    "mistral": {**_DECODER_TOKENS, "num_key_value_heads": 2},
    "opt": {"init_std": 0.25, "ffn_dim": 40, "word_embed_proj_dim": 32, "pad_token_id": 1},
}

#: Architectures that only generate: a causal language model stands for them.
DECODER_ARCHITECTURES = ("gpt2", "llama", "mistral", "opt")


def tiny_config(architecture: str, **config: Any) -> PretrainedConfig:
    """The config of a tiny model without dropout.

    Args:
        architecture: Transformers' model type: "bert", "gpt2", "llama", ….
        config: fields that replace those of the tiny config, by any name that the config class takes.
    """
    cls = CONFIG_MAPPING[architecture]
    default = cls()
    sizes = {name: value for name, value in STANDARD_SIZES.items() if hasattr(default, name)}
    dropout = {
        name: 0.0
        for name, value in vars(default).items()
        if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop")))
    }
    aliases = getattr(cls, "attribute_map", {})
    fields = {**sizes, **dropout, **ARCHITECTURE_FIELDS.get(architecture, {}), **config}
    # The config class must see one name only of fields that have two: `hidden_size` is GPT-2's `n_embd`.
    return cls(**{aliases.get(name, name): value for name, value in fields.items()})


def tiny_model(architecture: str, model_class: type | None = None, **config: Any) -> PreTrainedModel:
    """A tiny random model in evaluation mode, without dropout.

    Args:
        architecture: Transformers' model type: "bert", "gpt2", "llama", ….
        model_class: a class of that architecture or one of Transformers' Auto classes. Without it: the bare model of
            an encoder, the causal language model of a decoder, the sequence-to-sequence model of an encoder-decoder.
        config: fields of the config, see `tiny_config`.
    """
    made = tiny_config(architecture, **config)
    if model_class is None:
        decoder_class = AutoModelForCausalLM if architecture in DECODER_ARCHITECTURES else AutoModel
        model_class = AutoModelForSeq2SeqLM if made.is_encoder_decoder else decoder_class
    model = model_class(made) if issubclass(model_class, PreTrainedModel) else model_class.from_config(made)
    return model.eval()


@dataclass(frozen=True)
class Family:
    """One tiny architecture of the test matrix."""

    name: str
    causal: bool
    projections: tuple[str, ...]
    model_class: type | None = None
    num_layers: int = 2

    def build(self, **config: Any) -> PreTrainedModel:
        return tiny_model(self.name, self.model_class, **{"num_hidden_layers": self.num_layers, **config})

    def __str__(self) -> str:
        return self.name


BERT = Family("bert", False, ("query", "value"), AutoModelForMaskedLM)
GPT2 = Family("gpt2", True, ("c_attn",))
LLAMA = Family("llama", True, ("q_proj", "v_proj"))
FAMILIES = (BERT, GPT2, LLAMA)
DECODERS = (GPT2, LLAMA)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
TOKENS = """
alpha beta gamma delta the a of in to and is it on by for as with at from this that red blue green old new big small
one two three four five six seven eight nine ten cat dog bird fish tree house river stone sea sky sun
""".split()  # noqa: SIM905  (a list of 49 strings would take 49 lines)


def tiny_tokenizer(
    *, mask: bool = False, eos: bool = False, token_types: bool = False, unknown: bool = True
) -> PreTrainedTokenizerFast:
    """One token a word, `[CLS] A [SEP]` around a text and `[CLS] A [SEP] B [SEP]` around a pair.

    Args:
        mask: whether there is a token `[MASK]`.
        eos: whether there is a token `[EOS]`; no text gets it by itself.
        token_types: whether the tokenizer returns `token_type_ids`, 1 for the second text of a pair.
        unknown: whether other words become `[UNK]`; otherwise they are an error.
    """
    special = [token for token in SPECIAL_TOKENS if unknown or token != "[UNK]"]
    special += ["[MASK]"] * mask + ["[EOS]"] * eos
    vocabulary = {word: index for index, word in enumerate([*special, *TOKENS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]" if unknown else None))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if token_types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]" if unknown else None,
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]" if mask else None,
        eos_token="[EOS]" if eos else None,
        model_input_names=inputs,
    )


def sample_text(lines: int = 80) -> str:
    """Lines of 30 words, all different, without a blank one: one document a line."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(TOKENS), (lines, 30), generator=generator).tolist()
    return "\n".join(" ".join(TOKENS[index] for index in row) for row in picked) + "\n"


def save_checkpoint(
    folder: Path,
    architecture: str,
    model_class: type | None = None,
    *,
    mask: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A tiny random checkpoint with its tokenizer."""
    torch.manual_seed(seed)
    tiny_model(architecture, model_class, **config).save_pretrained(folder)
    tiny_tokenizer(mask=mask).save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------------------------
# The registry as test cases


def entries() -> list[AttentionEntry]:
    """Every registered mechanism that is not exact attention itself."""
    hla.list_attentions()
    return [entry for name, entry in sorted(ATTENTIONS) if name != EXACT]


def serves(entry: AttentionEntry, causal: bool) -> bool:
    return entry.causal if causal else entry.bidirectional


def every_pair(families: Sequence[Family] = FAMILIES, quick: Collection[tuple[str, Family]] | None = None) -> Any:
    """Parametrize a test over `name, family` for every mechanism and every family that it serves.

    quick: the pairs of the quick suite, where a test is expensive; the others are slow. (See `tests/sampling.py`, too.)
    """
    cases = []
    for entry in entries():
        for family in families:
            if serves(entry, family.causal):
                is_quick = quick is None or (entry.name, family) in quick
                marks = () if is_quick else (pytest.mark.slow,)
                cases.append(pytest.param(entry.name, family, id=f"{entry.name}-{family}", marks=marks))
    return pytest.mark.parametrize(("name", "family"), cases)


def every_refused_pair() -> Any:
    cases = [(entry.name, family) for entry in entries() for family in FAMILIES if not serves(entry, family.causal)]
    return pytest.mark.parametrize(("name", "family"), cases, ids=[f"{name}-{family}" for name, family in cases])


def every_mechanism(*, causal: bool) -> Any:
    """Parametrize a test over the `name` of every mechanism that serves the direction."""
    return pytest.mark.parametrize("name", [entry.name for entry in entries() if serves(entry, causal)])


def every_direction() -> Any:
    """Parametrize a test over `name, causal` for every mechanism and direction."""
    cases = [(entry.name, causal) for entry in entries() for causal in (False, True) if serves(entry, causal)]
    return pytest.mark.parametrize(
        ("name", "causal"), cases, ids=[f"{n}-{'causal' if c else 'both'}" for n, c in cases]
    )


def every_feature_map(*, signed: bool = True) -> Any:
    """Every map that is a function of the token alone (those with positions have tests of their own).

    `signed=False` leaves out maps whose weights can be negative.
    """
    hla.list_attentions()
    classes = {name: entry.factory for name, entry in FEATURE_MAPS if not entry.factory.uses_positions}
    return pytest.mark.parametrize("name", sorted(name for name, cls in classes.items() if signed or not cls.signed))


def small_options(options: type) -> dict[str, Any]:
    return {field.name: SMALL_OPTIONS[field.name] for field in fields(options) if field.name in SMALL_OPTIONS}


def patched(name: str, family: Family, **options: Any) -> PreTrainedModel:
    """A tiny model of the family, patched with small options."""
    return patch_small(family.build(), name, **options)


def patch_small(model: PreTrainedModel, name: str, **options: Any) -> PreTrainedModel:
    chosen = {**small_options(ATTENTIONS.get(name).options), **options}
    return randomize_learned(hla.patch_model(model, name, **chosen))


def randomize_learned(model: nn.Module) -> Any:
    """Move learned parameters off their symmetric start (equal heads, zero biases), in place."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "linear_attention" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (0.1 * noise * parameter.abs().max().clamp(min=0.1)).to(parameter.dtype)
    return model


def load_script(path: Path) -> ModuleType:
    """A recipe as a module, wherever it lies."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """`torch.set_default_dtype` for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def mechanism(name: str, causal: bool, heads: int = 4, groups: int = 2, dim: int = 6, value_dim: int = 6) -> Any:
    """A mechanism by itself, with small options, in float32; float64 by `.double()`."""
    hla.list_attentions()
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(heads, groups, dim, value_dim, layer_index=1, max_length=2048, causal=causal)
    options = build_options(entry, small_options(entry.options))
    module: LinearAttention = entry.factory(shape, options)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return module


def feature_map(name: str, heads: int = 4, groups: int = 2, dim: int = 6, **options: Any) -> FeatureMap:
    hla.list_attentions()
    entry = FEATURE_MAPS.get(name)
    chosen = build_options(entry, {**small_options(entry.options), **options})
    built = entry.factory(AttentionShape(heads, groups, dim, dim, layer_index=1, max_length=64, causal=True), chosen)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return built


# --------------------------------------------------------------------------------------------------------------------
# Inputs and comparisons


def token_ids(batch: int = 2, length: int = 21, seed: int = 0) -> Tensor:
    """Random tokens without the pad token 0 and the begin token 1."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def qkv(
    length: int, batch: int = 2, heads: int = 4, groups: int = 2, dim: int = 6, value_dim: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (groups, dim), (groups, value_dim))
    q, k, v = (torch.randn(batch, count, length, width, generator=generator) for count, width in shapes)
    return q, k, v


def padding_mask(lengths: list[int], total: int, padding: str) -> Tensor:
    """`[B, total]`, True for real tokens."""
    column = torch.arange(total)
    rows = [column < n if padding == "right" else column >= total - n for n in lengths]
    return torch.stack(rows)


def padded_batch(rows: list[Tensor], padding: str) -> dict[str, Tensor]:
    """Rows of different lengths as one batch, with the mask and the positions that generate() would pass."""
    total = max(len(row) for row in rows)
    mask = padding_mask([len(row) for row in rows], total, padding)
    ids = torch.zeros(len(rows), total, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, mask[row]] = tokens
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`max|a - b| / max|b|`; infinite where `a` is not finite."""
    if not actual.numel():
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-12)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    assert actual.shape == expected.shape
    error, limit = relative_error(actual, expected), TOLERANCE[dtype] * factor
    assert error <= limit, f"relative error {error:.2e} exceeds {limit:.2e}"


def config_dict(model: PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "_attn_implementation": model.config._attn_implementation}


@dataclass(frozen=True)
class Snapshot:
    """Everything that a failed call must leave as it was."""

    cls: type
    config: dict[str, Any]
    state: dict[str, Tensor]
    modules: list[str]
    hooks: int
    outputs: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, **inputs: Any) -> Snapshot:
        with torch.no_grad():
            outputs = model(**(inputs or {"input_ids": token_ids()}))[0]
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
        names = [f"{name}:{type(module).__name__}" for name, module in model.named_modules()]
        return cls(type(model), copy.deepcopy(config_dict(model)), state, names, hooks, outputs)

    def assert_same(self, model: PreTrainedModel, **inputs: Any) -> None:
        now = Snapshot.of(model, **inputs)
        assert now.cls is self.cls
        assert now.config == self.config
        assert now.modules == self.modules
        assert now.hooks == self.hooks
        assert list(now.state) == list(self.state)
        assert all(torch.equal(now.state[name], self.state[name]) for name in self.state)
        assert torch.equal(now.outputs, self.outputs)


def saved_and_loaded(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Any:
    model.save_pretrained(folder)
    return hla.load_pretrained(str(folder), **kwargs)
