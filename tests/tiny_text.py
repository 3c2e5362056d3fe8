"""A tokenizer of few words, and a text of these words."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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
