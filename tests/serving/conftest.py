"""An engine over a tiny model, and what `generate` answers to each prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_linear_attn.serving import Engine
from tests.inputs import token_ids
from tests.tiny_text import tiny_tokenizer

PROMPT_LENGTHS = (30, 1, 5, 17, 2)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    return [token_ids(1, length, length)[0].tolist() for length in lengths]


@contextmanager
def engine(model: Any, **options: Any) -> Iterator[Engine]:
    with Engine(model, tiny_tokenizer(), **{"chunk_length": 8, **options}) as running:
        yield running


def greedy_answer(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    """The greedy answer to a prompt by itself."""
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return answer[0, len(prompt) :].tolist()
