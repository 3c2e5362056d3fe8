"""A tokenizer with pairs and a mask token, and small files."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]")
WORDS = ("alpha", "beta", "gamma", "delta", "one", "two", "three", "four", "five", "six", "red", "blue", "green")
PACK = {"": lambda raw: raw, ".xz": lzma.compress, ".gz": gzip.compress}

#: The folder of real data sets, where it is at hand.
SHARED = Path(__file__).parents[3] / "shared" / "data"


def tokenizer(*, unknown: bool = True) -> PreTrainedTokenizerFast:
    """One token a word; `[CLS] A [SEP] B [SEP]` with token types. Without `unknown` other words are an error."""
    words = [word for word in (*SPECIAL, *WORDS) if unknown or word != "[UNK]"]
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]" if unknown else None))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]" if unknown else None,
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def write(folder: Path, files: dict[str, str]) -> Path:
    """Text files, packed if their names say so."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](text.encode()))
    return folder
