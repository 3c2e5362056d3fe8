"""Former names of `data.text`, until nothing imports them any more."""

from ..data.text import Text, read_text, split_documents
from ..data.text import encode_text as _encode
from ..data.text import pad_token as pad_id
from ..data.text import padded_batches as make_batches
from ..data.text import token_documents as whole_documents
from ..data.text import token_passages as passages

__all__ = ["Text", "encode", "make_batches", "pad_id", "passages", "read_text", "split_documents", "whole_documents"]


def encode(tokenizer, text, *, special=False):  # type: ignore[no-untyped-def]
    return _encode(tokenizer, text, add_special_tokens=special)
