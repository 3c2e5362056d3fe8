"""Tiny checkpoints with a tokenizer, made on the fly."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertModel, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ..helpers import bert_config, gpt2_config, llama_config

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "the",
    "a",
    "of",
    "in",
    "to",
    "and",
    "is",
    "it",
    "on",
    "by",
    "for",
    "as",
    "with",
    "at",
    "from",
    "this",
    "that",
    "red",
    "blue",
    "green",
    "old",
    "new",
    "big",
    "small",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "cat",
    "dog",
    "bird",
    "fish",
    "tree",
    "house",
    "river",
    "stone",
    "sea",
    "sky",
    "sun",
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, `[CLS] … [SEP]` around a text."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def tiny_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "bert":
        return BertModel(bert_config())
    if kind == "gpt2":
        return GPT2LMHeadModel(gpt2_config())
    return LlamaForCausalLM(llama_config())


def save_checkpoint(folder: Path, kind: str) -> Path:
    """A checkpoint of a tiny random model with its tokenizer."""
    tiny_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def some_text(lines: int = 80) -> str:
    """Lines of words, all different, without a blank one: one document a line."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(WORDS), (lines, 30), generator=generator).tolist()
    return "\n".join(" ".join(WORDS[index] for index in row) for row in picked) + "\n"
