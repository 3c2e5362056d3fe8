"""A request to the engine: its tokens, its text piece by piece, and how it ended."""

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig

from .sampling import Sampler

Listener = Callable[["str | BaseException | None"], None]
"""Called from the engine's thread with each piece of text, and at the end with None or with an error."""


class CancelledRequestError(RuntimeError):
    """The request was cancelled before it ended."""


class Request:
    """One prompt and what the model answers, as the engine writes it.

    Iterating yields the text piece by piece and ends with the answer; an error of the engine is raised there.

    Attributes:
        prompt: The ids of the prompt.
        tokens: The ids of the prompt and of the answer so far, an end-of-sequence token included.
        text: The answer so far, up to a stop string.
        finish_reason: "stop" (an end-of-sequence token or a stop string), "length", "cancelled", "error", or None
            while it runs.
        cached: How many tokens of the prompt were read before, in a kept prefix.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        seed: int | None = None,
        listener: Listener | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self.max_new_tokens = max_new_tokens
        self.sampler = Sampler(config, seed)
        self.end_tokens = end_tokens(config)
        self.text, self.cached = "", 0
        self.finish_reason: str | None = None
        self.is_cancelled = False
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = listener or self._events.put
        stops = config.stop_strings or []
        self._stops = [stops] if isinstance(stops, str) else list(stops)
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise ValueError(f"stop_strings must be texts of at least one character, got {self._stops!r}.")
        self._decoder = DecodeStream([], skip_special_tokens)
        self._tokenizer = tokenizer
        self._pending = ""

    @property
    def answer(self) -> list[int]:
        """The ids of the answer so far."""
        return self.tokens[len(self.prompt) :]

    def cancel(self) -> None:
        """Stop it: its row is freed before the next token."""
        self.is_cancelled = True

    def result(self) -> str:
        """Wait for the end, and return the text of the whole answer. It raises what iterating would raise."""
        for _ in self:
            pass
        return self.text

    def __iter__(self) -> Iterator[str]:
        while (event := self._events.get()) is not None:
            if isinstance(event, BaseException):
                self._events.put(event)  # for whoever asks again
                raise event
            yield event
        self._events.put(None)

    def add(self, token: int) -> bool:
        """Take a token of the answer; return whether it was the last one. Called by the engine only."""
        self.tokens.append(token)
        piece = self._decoder.step(self._tokenizer, token) or ""
        if self._take_text(piece) or token in self.end_tokens:
            self.finish("stop")
        elif len(self.tokens) - len(self.prompt) >= self.max_new_tokens:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, with an error or with what was held back. Called by the engine only."""
        self.finish_reason = reason
        self._send(self._pending)
        self._pending = ""
        self._listener(error)

    def _take_text(self, piece: str) -> bool:
        """Send what cannot be the begin of a stop string any more; return whether there is a whole one."""
        self._pending += piece
        starts = [start for start in map(self._pending.find, self._stops) if start >= 0]
        if starts:
            self._pending = self._pending[: min(starts)]
            return True
        overlap = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - overlap
        self._send(self._pending[:cut])
        self._pending = self._pending[cut:]
        return False

    def _send(self, text: str) -> None:
        if text:
            self.text += text
            self._listener(text)


def end_tokens(config: GenerationConfig) -> frozenset[int]:
    """Return the ids that end an answer; a config has one, several or none."""
    ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
