"""Prompts that ask for something said once, far back: synthetic, seeded, made of the tokens of any tokenizer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from .text import encode_text, special_tokens

#: Text that prompts are filled with. A tokenizer that cannot encode it gets random tokens instead.
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. A river runs past the old mill. Bread is baked early in "
    "the morning. Some birds fly south in autumn. The train leaves at noon. Rain fell on the roof all night. A cat "
    "sleeps by the window. The market opens on Fridays. Snow covers the hills in winter. Two boats lie in the harbour. "
    "The school is across the street. Apples ripen late this year. The clock on the tower is slow. Here we go again."
)
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")

#: Needles of the task `needles`; tokens of an induction's context and answer; tokens of a random pass key.
NEEDLES, CONTEXT, COPIED, KEY = 4, 8, 4, 5


@dataclass(frozen=True)
class Prompt:
    """One question, at the end of a prompt."""

    ids: list[int]
    answer: list[int]
    position: int  # of the answer's first token in `ids`, where it was said


Statement = tuple[list[int], list[int], list[int]]
"""Tokens before the answer, the answer, and tokens after it."""


class PromptMaker:
    """Makes prompts for a tokenizer; text that it cannot encode is replaced by random tokens.

    Args:
        tokenizer: Any tokenizer.
        vocabulary: Number of tokens that the model knows.

    Raises:
        ValueError: The tokenizer has too few ordinary tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None = None) -> None:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        size = min(len(tokenizer), vocabulary or len(tokenizer))
        self.tokenizer = tokenizer
        self.ordinary = [token for token in range(size) if token not in special]
        if len(self.ordinary) < 2 * CONTEXT:
            raise ValueError(f"The tokenizer has {len(self.ordinary)} ordinary tokens; {2 * CONTEXT} are needed.")
        self.sentences = [self._encode(f" {sentence}.") for sentence in FILLER.removesuffix(".").split(". ")]
        self.reads_text = all(self.sentences) and bool(self._encode(" The pass key of Anna is 12345."))
        if self.reads_text:  # Small models hardly know what most of their tokens mean.
            self.ordinary = sorted({token for sentence in self.sentences for token in sentence})
        else:
            self.sentences = [[token] for token in self.ordinary]
        self.before, self.after = special_tokens(tokenizer, [FILLER]) if self.reads_text else ([], [])

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text; none where the tokenizer cannot encode it."""
        try:
            ids = encode_text(self.tokenizer, text)
        except ValueError:
            return []
        return [] if self.tokenizer.unk_token_id in ids else ids

    def statement(self, rng: random.Random, name: str | None = None) -> Statement:
        """A sentence with a random key, which is the answer."""
        if not self.reads_text:
            return rng.choices(self.ordinary, k=CONTEXT), rng.choices(self.ordinary, k=KEY), []
        opening = " The pass key is" if name is None else f" The pass key of {name} is"
        key = f" {rng.randrange(10**KEY // 10, 10**KEY)}"
        return self._encode(opening), self._encode(key), self._encode(".")

    def prompt(
        self,
        rng: random.Random,
        length: int,
        depth: float,
        statements: Sequence[Statement],
        *,
        filler: Sequence[list[int]] | None = None,
        question: list[int] | None = None,
    ) -> Prompt:
        """Insert statements into filler: the first at a depth from 0 (the beginning) to 1, the others evenly spread.

        The filler is drawn from the given pieces (None: sentences). The question at the end is what precedes the answer
        of the first statement, unless it is given.

        Raises:
            ValueError: The prompt is too short for them.
        """
        opening, answer, _ = statements[0]
        question = opening if question is None else question
        pieces = [[token for part in statement for token in part] for statement in statements]
        capacity = length - len(self.before) - len(question) - sum(map(len, pieces))
        if capacity < 0:
            raise ValueError(f"A prompt of {length} tokens has no room for the question. Give longer ones.")
        tokens: list[int] = []
        while len(tokens) < capacity:
            tokens += rng.choice(filler or self.sentences)
        depths = [depth, *((index + 0.5) / (len(pieces) - 1) for index in range(len(pieces) - 1))]
        ids, used, position = list(self.before), 0, 0
        for own, index in sorted((own, index) for index, own in enumerate(depths)):
            start = round(own * capacity)
            ids += tokens[used:start]
            position = position if index else len(ids) + len(opening)
            ids += pieces[index]
            used = start
        return Prompt([*ids, *tokens[used:capacity], *question], answer, position)


def _key_value(maker: PromptMaker, rng: random.Random, length: int, depth: float) -> Prompt:
    """Pairs of random tokens (MQAR: Arora et al. 2023, arXiv:2312.04927); the value of one key is asked for."""
    key, value = rng.sample(maker.ordinary, 2)
    others = [[token] for token in maker.ordinary if token != key]
    return maker.prompt(rng, length, depth, [([key], [value], [])], filler=others)


def _induction(maker: PromptMaker, rng: random.Random, length: int, depth: float) -> Prompt:
    """A passage of random tokens that begins again at the end (Olsson et al. 2022, arXiv:2209.11895)."""
    passage = rng.choices(maker.ordinary, k=CONTEXT + COPIED)
    statements: list[Statement] = [(passage[:CONTEXT], passage[CONTEXT:], [])]
    return maker.prompt(rng, length, depth, statements, filler=[[token] for token in maker.ordinary])


TASKS: dict[str, Callable[[PromptMaker, random.Random, int, float], Prompt]] = {
    # One sentence in filler.
    "pass_key": lambda maker, rng, length, depth: maker.prompt(rng, length, depth, [maker.statement(rng)]),
    # Several such sentences, each with a name; one of them is asked for.
    "needles": lambda maker, rng, length, depth: maker.prompt(
        rng, length, depth, [maker.statement(rng, name) for name in rng.sample(NAMES, NEEDLES)]
    ),
    "key_value": _key_value,
    "induction": _induction,
}


def check_positions(model: Any, length: int) -> None:
    """Raise a ValueError for prompts and answers of so many tokens that a table of positions has no place for."""
    limit = longest_input(model) if isinstance(model, PreTrainedModel) else None
    if limit is not None and length > limit and has_position_table(model):
        raise ValueError(f"Prompts and answers of {length} tokens are beyond the model's {limit} positions.")
