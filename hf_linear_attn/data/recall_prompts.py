"""Prompts that ask for something said far back: the tasks of RULER and MQAR, seeded, offline, for any tokenizer.

RULER: Hsieh et al. 2024, arXiv:2404.06654. MQAR (multi-query associative recall): Arora et al. 2023, arXiv:2312.04927.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from .text import encode_text, special_tokens, standard_library_documents

#: RULER's sentences of noise.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

ADJECTIVES = """
able ancient bitter blue brave bright broken calm cheap clean clever cold cruel curly dark deep dry dull eager early
empty fair famous fast fierce flat fresh gentle golden grand happy heavy hollow honest huge icy idle jolly kind late
lazy light loud lucky mild narrow noble odd pale plump proud quick quiet rapid rare rough round salty shiny shy silent
""".split()  # noqa: SIM905
NOUNS = """
anchor apple arrow badge basket beach bell bird boat bottle branch bridge brush button cabin camel candle canyon
castle cloud coin crown desert dragon engine falcon feather fence flute forest garden glacier hammer harbor helmet
island jacket kettle ladder lantern lemon lion magnet maple market meadow mirror mountain needle ocean orchard parrot
pebble pillow planet rabbit ribbon river rocket saddle shovel spider tower tunnel turtle valley violin
""".split()  # noqa: SIM905

#: Needles in a text, and values of a key, where a task has several; assignments of variables; tokens that a greedy
#: answer may have beyond those that are expected, such as a colon or commas.
NEEDLES, HOPS, SLACK = 4, 4, 4


@dataclass(frozen=True)
class Prompt:
    """A question at the end of a text."""

    ids: list[int]  # tokens of the prompt
    references: list[list[int]]  # tokens of every expected answer
    positions: list[int]  # the index in `ids` at which each of them is said
    shared: int  # tokens at the beginning that are those of the other prompts about the same text
    depth: float  # of the answer, from 0 (the beginning of the text) to 1; NaN if it is said in several places
    new_tokens: int  # to generate


@dataclass(frozen=True)
class Needle:
    """Something said once in a text: tokens before the answer, the answer, tokens after it, and its depth."""

    before: list[int]
    answer: list[int]
    after: list[int]
    depth: float


class PromptMaker:
    """Makes prompts for a tokenizer. Text that it cannot encode becomes arbitrary tokens: one for each word and digit.

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
        self.tokens = [token for token in range(size) if token not in special]
        if len(self.tokens) < 16:
            raise ValueError(f"The tokenizer has {len(self.tokens)} ordinary tokens; 16 are needed.")
        # An unknown letter of an answer would be decoded as nothing, which every output contains.
        letters = f" VAR {string.ascii_uppercase} {string.ascii_lowercase}-{string.digits}."
        self.reads_text = bool(self._encoded(" ".join(NOISE) + letters))
        self.before, self.after = special_tokens(tokenizer, [NOISE[0]]) if self.reads_text else ([], [])
        # Small models hardly know what most of their tokens mean.
        nouns = [self.encode(f" {word}") for word in NOUNS] if self.reads_text else []
        self.common = sorted({*itertools.chain.from_iterable(nouns)}) or self.tokens

    def _encoded(self, text: str) -> list[int]:
        try:
            ids = encode_text(self.tokenizer, text)
        except ValueError:
            return []
        return [] if self.tokenizer.unk_token_id in ids else ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        if self.reads_text:
            return encode_text(self.tokenizer, text)
        pieces = re.findall(r"\d|[^\W\d]+|[^\w\s]", text)
        return [self.tokens[zlib.crc32(piece.encode()) % len(self.tokens)] for piece in pieces]

    def score(self, prompt: Prompt, output: Sequence[int]) -> float:
        """Return the share of the expected answers that the generated text contains, as RULER does.

        An answer without slack must be the expected tokens themselves.
        """
        expected = [*itertools.chain.from_iterable(prompt.references)]
        if prompt.new_tokens == len(expected):
            return float(list(output[: len(expected)]) == expected)
        text = self._text(output)
        return sum(self._text(reference) in text for reference in prompt.references) / len(prompt.references)

    def _text(self, ids: Sequence[int]) -> str:
        if self.reads_text:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        return "".join(f" {token} " for token in ids)

    def needle(self, before: str, answer: str, after: str, depth: float) -> Needle:
        """Encode a statement; the answer begins with a space."""
        return Needle(self.encode(before), self.encode(f" {answer}"), self.encode(after), depth)

    def prompts(
        self,
        length: int,
        needles: Sequence[Needle],
        questions: Sequence[tuple[list[int], list[int]]],
        filler: Iterator[list[int]],
        *,
        header: str = "",
        slack: int = SLACK,
    ) -> list[Prompt]:
        """Put needles into a text, and ask questions about it: prompts of one length that begin with the same tokens.

        Args:
            length: Tokens of every prompt.
            needles: What is said once, at its depth.
            questions: The tokens of each question, and the indices of the needles that answer it.
            filler: Pieces of text between which needles may stand.
            header: What the text begins with.
            slack: Tokens that an answer may have beyond those that are expected, for each of them.

        Raises:
            ValueError: The length has no room for them.
        """
        start = [*self.before, *(self.encode(header) if header else [])]
        longest = max(len(question) for question, _ in questions)
        inserted = sum(len(one.before) + len(one.answer) + len(one.after) for one in needles)
        capacity = length - len(start) - inserted - longest
        if capacity < 0:
            raise ValueError(f"A prompt takes {length - capacity} tokens or more, got {length}.")
        tokens: list[int] = []
        ends = [0]
        while len(tokens) < capacity:
            tokens += next(filler)
            ends.append(len(tokens))
        surplus = len(tokens) - capacity  # cut off at the beginning, so that the last piece is complete
        tokens = tokens[surplus:]
        ends = [end - surplus for end in ends if end >= surplus]
        tail: list[int] = []
        while len(tail) < longest:
            tail += next(filler)
        ids, used, positions = list(start), 0, {}
        for index, one in sorted(enumerate(needles), key=lambda pair: pair[1].depth):
            end = max(min(ends, key=lambda end: abs(end - one.depth * capacity)), used)
            ids += tokens[used:end] + one.before
            positions[index], used = len(ids), end
            ids += one.answer + one.after
        ids += tokens[used:]
        prompts = []
        for question, answers in questions:
            padding = tail[: longest - len(question)]
            references = [needles[index].answer for index in answers]
            depth = needles[answers[0]].depth if len(answers) == 1 else math.nan
            count = sum(map(len, references)) + slack * len(references)
            answer_positions = [positions[index] for index in answers]
            prompts.append(Prompt([*ids, *padding, *question], references, answer_positions, len(ids), depth, count))
        return prompts


# ---------- what texts are made of


def _noise(maker: PromptMaker, rng: random.Random) -> Iterator[list[int]]:
    return itertools.cycle([maker.encode(f" {sentence}") for sentence in NOISE])


@cache
def _sentences() -> list[list[str]]:
    documents = [re.split(r"(?<=[.!?:])\s+", document) for document in standard_library_documents()]
    return [[" ".join(sentence.split()) for sentence in document] for document in documents]


def _prose(maker: PromptMaker, rng: random.Random) -> Iterator[list[int]]:
    """Sentences of docstrings of the standard library, in their order; RULER has essays that cannot be shipped."""
    documents = _sentences()
    while True:
        document = rng.choice(documents)
        yield from (maker.encode(f" {sentence}") for sentence in document if sentence)


def _word(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(make: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        # After many keys of two words a third one makes them differ.
        key = make(rng) if len(seen) < 1000 else f"{make(rng)}-{rng.choice(NOUNS)}"
        if key not in seen:
            seen.add(key)
            yield key


# ---------- tasks

PromptFunction = Callable[[PromptMaker, random.Random, int, Sequence[float]], list[Prompt]]
"""`task(maker, rng, length, depths)` makes as many prompts as there are depths."""


def _niah(
    maker: PromptMaker,
    rng: random.Random,
    length: int,
    depths: Sequence[float],
    *,
    filler: Callable[[PromptMaker, random.Random], Iterator[list[int]]] | None = _prose,
    keys: Callable[[random.Random], str] = _word,
    values: Callable[[random.Random], str] = _number,
    count: int = NEEDLES,
) -> list[Prompt]:
    """Several keys with a value each in one text; each question asks for one. Without filler all of it are needles."""
    kind = "uuid" if values is _uuid else "number"
    names = _distinct(keys, rng)

    def needle(depth: float) -> tuple[str, Needle]:
        key = next(names)
        return key, maker.needle(f" One of the special magic {kind}s for {key} is:", values(rng), ".", depth)

    others = [(index + 0.5) / (count - len(depths)) for index in range(count - len(depths))]
    needles = [needle(depth) for depth in (*depths, *others)]
    questions = [(_question(maker, f"{kind} for {key}"), [index]) for index, (key, _) in enumerate(needles)]
    if filler is None:
        distractors = (needle(0.0)[1] for _ in itertools.count())
        pieces: Iterator[list[int]] = ([*one.before, *one.answer, *one.after] for one in distractors)
    else:
        pieces = filler(maker, rng)
    return maker.prompts(length, [one for _, one in needles], questions[: len(depths)], pieces, header=_header(kind))


def _header(kind: str) -> str:
    return (
        f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.\n"
    )


def _question(maker: PromptMaker, what: str, several: bool = False) -> list[int]:
    asks, verb = ("What are all", "are") if several else ("What is", "is")
    topic = f"special magic {what} mentioned in the provided text"
    return maker.encode(f"\n{asks} the {topic}? The {topic} {verb}")


def _one_by_one(
    make: PromptFunction, maker: PromptMaker, rng: random.Random, length: int, depths: Sequence[float]
) -> list[Prompt]:
    """A text of its own for each prompt."""
    return [*itertools.chain.from_iterable(make(maker, rng, length, [depth]) for depth in depths)]


def _niah_several(
    maker: PromptMaker, rng: random.Random, length: int, depths: Sequence[float], *, one_key: bool
) -> list[Prompt]:
    """One question about four needles at random depths: all values of one key, or the values of four keys."""
    names = list(itertools.islice(_distinct(_word, rng), NEEDLES))
    keys = names[:1] * NEEDLES if one_key else names
    needles = [
        maker.needle(f" One of the special magic numbers for {key} is:", _number(rng), ".", rng.random())
        for key in keys
    ]
    what = keys[0] if one_key else ", ".join(keys[:-1]) + f", and {keys[-1]}"
    questions = [(_question(maker, f"numbers for {what}", several=True), list(range(NEEDLES)))]
    return maker.prompts(length, needles, questions, _prose(maker, rng), header=_header("number"))


def _variable_tracking(maker: PromptMaker, rng: random.Random, length: int, depths: Sequence[float]) -> list[Prompt]:
    """A chain of assignments in noise, at random depths; the question asks for all variables that have its value."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(HOPS + 1)]
    start = str(rng.randrange(10**4, 10**5))
    values = [start, *(f"VAR {name}" for name in names)]
    at = sorted(rng.random() for _ in names)
    needles = [
        maker.needle(" VAR", name, f" = {value}.", depth) for name, value, depth in zip(names, values, at, strict=False)
    ]
    question = (
        f"\nQuestion: Find all variables that are assigned the value {start} in the text above. Answer: According "
        "to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {start}, they are:"
    )
    header = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    questions = [(maker.encode(question), list(range(len(names))))]
    return maker.prompts(length, needles, questions, _noise(maker, rng), header=header)


def _mqar(maker: PromptMaker, rng: random.Random, length: int, depths: Sequence[float]) -> list[Prompt]:
    """Pairs of random tokens; each question is the key of one pair, which stands nowhere else."""
    keys = rng.sample(maker.common, len(depths))
    others = [token for token in maker.common if token not in keys]
    needles = [Needle([key], [rng.choice(others)], [], depth) for key, depth in zip(keys, depths, strict=True)]
    filler = ([rng.choice(others)] for _ in itertools.count())
    return maker.prompts(length, needles, [([key], [index]) for index, key in enumerate(keys)], filler, slack=0)


PROMPT_FUNCTIONS: dict[str, PromptFunction] = {
    "niah_single_1": partial(_one_by_one, partial(_niah, count=1, filler=_noise)),
    "niah_single_2": partial(_one_by_one, partial(_niah, count=1)),
    "niah_single_3": partial(_one_by_one, partial(_niah, count=1, values=_uuid)),
    "niah_multikey_1": _niah,
    "niah_multikey_2": partial(_niah, filler=None),
    "niah_multikey_3": partial(_niah, filler=None, keys=_uuid, values=_uuid),
    "niah_multivalue": partial(_one_by_one, partial(_niah_several, one_key=True)),
    "niah_multiquery": partial(_one_by_one, partial(_niah_several, one_key=False)),
    "vt": partial(_one_by_one, _variable_tracking),
    "mqar": _mqar,
}


def documents_with_a_needle(
    maker: PromptMaker, rng: random.Random, length: int, depth: float, count: int
) -> tuple[list[Prompt], list[list[int]]]:
    """Return documents with a sentence each at the same depth, and the sentences."""
    needles = []
    for key in itertools.islice(_distinct(_word, rng), count):
        needles.append(maker.needle(f" One of the special magic numbers for {key} is:", _number(rng), ".", depth))
    documents = [maker.prompts(length, [one], [(maker.after, [0])], _prose(maker, rng))[0] for one in needles]
    return documents, [[*one.before, *one.answer, *one.after] for one in needles]


def check_positions(model: Any, length: int) -> None:
    """Raise a ValueError for prompts and answers of so many tokens that a table of positions has no entry for."""
    limit = longest_input(model) if isinstance(model, PreTrainedModel) else None
    if limit is not None and length > limit and has_position_table(model):
        raise ValueError(f"Prompts and answers of {length} tokens are beyond the model's {limit} positions.")
