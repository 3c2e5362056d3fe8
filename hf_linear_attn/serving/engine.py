"""A batch that changes while it runs: requests join and leave at every token.

One thread runs the model. It reads the prompt of one request after the other, in pieces, and between two pieces all
rows of the batch get one token. A prompt is read up to its last token, by a cache of its own; with that token the row
joins the batch (`integration.cache_rows`). So a row's tokens do not depend on who shares the batch, up to rounding.
"""

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..integration.cache_argument import cache_argument
from ..integration.cache_rows import extend_rows, filter_rows
from ..integration.models import check_model
from ..integration.packing import STATE_LOST, restarting_mixer
from ..integration.positions import first_position, length_limit
from ..streaming import cache_bytes
from ..utils.options import check_argument
from .prefixes import MEGABYTE, PrefixStore
from .requests import CancelledRequestError, Listener, Request, end_tokens
from .sampling import config_of_request

logger = logging.getLogger(__name__)

#: Seconds between two lines of the log, and the longest time that an idle engine sleeps.
LOG_INTERVAL = 60.0

#: Tokens of an answer where neither the request nor the model says how many.
DEFAULT_NEW_TOKENS = 1024


class QueueFullError(RuntimeError):
    """There are as many waiting requests as there may be."""


@dataclass
class _Reading:
    """A prompt that is being read: its cache, the tokens read, and where its next pieces end."""

    request: Request
    cache: Cache
    position: int
    ends: list[int]


class Engine:
    """Serves many requests with one model; `submit` and `stream` may be called from any thread.

    Args:
        model: A decoder with a language modelling head, patched or not, in evaluation mode. While the engine runs,
            nobody else may run or change it.
        tokenizer: Its (fast) tokenizer.
        max_batch: The most rows of the batch.
        max_queue: The most requests that wait for a row; `submit` raises QueueFullError beyond.
        max_length: The most tokens of a prompt and its answer (None: as many as the model is made for).
        chunk_length: The most tokens of a piece of a prompt.
        prefix_cache_mb: The most memory for kept prefixes, in MB (0: none).
        prefix_dir: A folder for kept prefixes, which then outlive the process (None: none). Patched models only.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or the tokenizer is not a fast one.
        ValueError: An option is out of range, or the model is in training mode or does not generate.
        NotImplementedError: The model has layers whose states cannot be joined.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_batch: int = 32,
        max_queue: int = 256,
        max_length: int | None = None,
        chunk_length: int = 512,
        prefix_cache_mb: int = 512,
        prefix_dir: str | Path | None = None,
    ) -> None:
        for name, value in {"max_batch": max_batch, "max_queue": max_queue, "chunk_length": chunk_length}.items():
            check_argument(name, value, int, least=1)
        check_argument("prefix_cache_mb", prefix_cache_mb, int, least=0)
        _check_served(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.max_batch = max_batch
        self.max_queue = max_queue
        self.chunk_length = chunk_length
        limit = length_limit(model)
        self.max_length = min((n for n in (max_length, limit) if n is not None), default=None)
        self.prefixes = PrefixStore(model, prefix_cache_mb * MEGABYTE, None if prefix_dir is None else Path(prefix_dir))
        #: How many requests, tokens of prompts that were read, and tokens of answers there were so far.
        self.requests = self.prompt_tokens = self.new_tokens = 0
        #: The bytes of the states of all rows.
        self.state_bytes = 0
        self.running: list[Request] = []
        self._cache: Cache | None = None
        self._waiting: deque[Request] = deque()
        self._reading: _Reading | None = None
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._origin = first_position(model)
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._border_tokens = end_tokens(model.generation_config) | {tokenizer.eos_token_id}
        self._closing, self._logged = False, (time.monotonic(), 0)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hf-linear-attn engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        listener: Listener | None = None,
        skip_special_tokens: bool = True,
        **options: Any,
    ) -> Request:
        """Queue a request, and return it at once.

        Args:
            prompt: A text, which the tokenizer encodes, or token ids (those of a chat template, say).
            seed: Of what is drawn (None: another one each time).
            generation_config: Options of the answer (None: those of the model).
            listener: Is called with what iterating over the request would yield, and instead of it.
            skip_special_tokens: Whether the text has no special tokens.
            options: Options of the answer that replace those of the config, as in `generate`: `max_new_tokens`,
                `do_sample`, `temperature`, `stop_strings`, …

        Raises:
            QueueFullError: Too many requests wait.
            RuntimeError: The engine is closed.
            TypeError: There is no such option, or the ids are no whole numbers.
            ValueError: The prompt is empty, too long or has ids that the model has not; or an option is out of range.
            NotImplementedError: An option is not served.
        """
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        config = config_of_request(self.model, generation_config, options)
        request = Request(
            ids,
            config,
            self.tokenizer.backend_tokenizer,
            max_new_tokens=self._new_tokens(ids, config.max_new_tokens),
            seed=seed,
            listener=listener,
            skip_special_tokens=skip_special_tokens,
        )
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise RuntimeError("The engine is closed.")
            if len(self._waiting) >= self.max_queue:
                raise QueueFullError(f"{self.max_queue} requests are waiting already. Try again later.")
            self._waiting.append(request)
            self.requests += 1
            self._changed.notify_all()
        return request

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """Yield the text of the answer to a prompt piece by piece; who leaves early frees the row. See `submit`."""
        request = self.submit(prompt, **options)
        try:
            yield from request
        finally:
            request.cancel()

    def close(self, *, wait: bool = True) -> None:
        """End the engine: the requests that there are end first, or, without `wait`, are cancelled."""
        with self._changed:
            self._closing = True
            if not wait:
                for request in self._all_requests():
                    request.cancel()
            self._changed.notify_all()
        self._thread.join()

    def is_alive(self) -> bool:
        """Return whether the engine takes requests."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> dict[str, int]:
        """Return counters and sizes, by the names that they have in `/metrics`."""
        return {
            "requests_total": self.requests,
            "prompt_tokens_total": self.prompt_tokens,
            "generated_tokens_total": self.new_tokens,
            "prefix_hits_total": self.prefixes.hits,
            "prefix_misses_total": self.prefixes.misses,
            "requests_waiting": len(self._waiting) + (self._reading is not None),
            "requests_running": len(self.running),
            "state_bytes": self.state_bytes,
            "prefix_bytes": self.prefixes.nbytes,
        }

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def _new_tokens(self, ids: list[int], requested: int | None) -> int:
        """Check a prompt, and return how many tokens its answer may have."""
        embeddings: Any = self.model.get_input_embeddings()
        rows = embeddings.weight.shape[0]
        if not ids:
            raise ValueError("The prompt is empty. Give at least one token.")
        if not all(isinstance(token, int) and 0 <= token < rows for token in ids):
            raise ValueError(f"The prompt has token ids outside of 0 to {rows - 1}.")
        count = requested or DEFAULT_NEW_TOKENS
        if self.max_length is None:
            return count
        if len(ids) >= self.max_length:
            raise ValueError(f"The prompt has {len(ids)} tokens; {self.max_length - 1} fit. Shorten it.")
        return min(count, self.max_length - len(ids))

    def _all_requests(self) -> list[Request]:
        reading = [] if self._reading is None else [self._reading.request]
        return [*self._waiting, *reading, *self.running]

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            logger.exception("The engine has ended.")
            with self._changed:
                self._closing = True
            for request in self._all_requests():
                request.finish("error", error)

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._all_requests() and not self._closing:
                    self._changed.wait(LOG_INTERVAL)
                    self._log()
                if not self._all_requests():
                    return
            self._drop_cancelled()
            self._read_piece()
            self._step()
            self.state_bytes = 0 if self._cache is None else cache_bytes(self._cache)
            self._log()

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [request for request in self._waiting if request.is_cancelled]
            for request in cancelled:
                self._waiting.remove(request)
        if self._reading is not None and self._reading.request.is_cancelled:
            cancelled.append(self._reading.request)
            self._reading = None
        cancelled += [request for request in self.running if request.is_cancelled]
        if any(request.is_cancelled for request in self.running):
            self._keep([index for index, request in enumerate(self.running) if not request.is_cancelled])
        for request in cancelled:
            request.finish("cancelled", CancelledRequestError("The request was cancelled."))

    def _read_piece(self) -> None:
        """Read a piece of a prompt, if there is one to read and a row for it; at the end of it the row joins."""
        if self._reading is None:
            with self._changed:
                if not self._waiting or len(self.running) >= self.max_batch:
                    return
                request = self._waiting.popleft()
                self._reading = _Reading(request, DynamicCache(config=self.model.config), 0, [])
        reading, request = self._reading, self._reading.request
        last = len(request.prompt) - 1
        try:
            if not reading.position and self.prefixes.limit:
                request.cached, reading.cache = self.prefixes.longest(request.prompt)
                reading.position = request.cached
            if not reading.ends:
                borders = [i + 1 for i, token in enumerate(request.prompt) if token in self._border_tokens]
                reading.ends = piece_ends(reading.position, last, borders, self.chunk_length)
            if reading.position < last:
                self._read_until(reading, reading.ends.pop(0))
            if reading.position == last:
                self._reading = None
                self._join(request, reading.cache)
        except Exception as error:  # whatever it is, only this request fails
            self._reading = None
            logger.exception("A request failed while its prompt was read.")
            request.finish("error", error)

    def _read_until(self, reading: _Reading, end: int) -> None:
        tokens, start = reading.request.prompt, reading.position
        positions = torch.arange(start, end)[None]
        self._forward(torch.tensor([tokens[start:end]]), reading.cache, positions, None)
        reading.position = end
        self.prompt_tokens += end - start
        is_border = end == len(tokens) - 1 or tokens[end - 1] in self._border_tokens
        if is_border and self.prefixes.limit:
            self.prefixes.keep(tokens[:end], reading.cache)

    def _join(self, request: Request, cache: Cache) -> None:
        """Add a row that has read all but the last token of its prompt; one without a state gets its first token."""
        if len(request.prompt) == 1:
            logits = self._forward(torch.tensor([request.prompt]), cache, torch.tensor([[0]]), None)
            if not self._draw([request], logits):
                return
        if self._cache is None:
            self._cache = cache
        else:
            extend_rows(self._cache, cache)
        self.running.append(request)

    def _step(self) -> None:
        """Give every row a token, and let those go that have their last."""
        if self._cache is None:
            return
        try:
            lengths = torch.tensor([len(request.tokens) for request in self.running])
            columns = self._cache.get_seq_length() + 1
            padding = columns - lengths
            mask = None
            if bool(padding.any()):
                mask = (torch.arange(columns) >= padding[:, None]).long()
            ids = torch.tensor([request.tokens[-1:] for request in self.running])
            logits = self._forward(ids, self._cache, lengths[:, None] - 1, mask)
            remaining = self._draw(self.running, logits)
            if len(remaining) < len(self.running):
                self._keep(remaining)
        except Exception as error:  # the rows share a state, which is lost
            logger.exception("A step failed.")
            failed, self.running, self._cache = self.running, [], None
            for request in failed:
                if request.finish_reason is None:
                    request.finish("error", error)

    def _forward(self, ids: Tensor, cache: Cache, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run the model on new tokens `[B, n]` and return the logits of the last, `[B, V]`."""
        device = self.model.device
        options: dict[str, Any] = {**self._options, **cache_argument(self.model, cache)}
        if self._takes_positions:
            options["position_ids"] = (positions + self._origin).to(device)
        mask = None if mask is None else mask.to(device)
        return self.model(ids.to(device), attention_mask=mask, use_cache=True, **options).logits[:, -1]

    def _draw(self, requests: list[Request], logits: Tensor) -> list[int]:
        """Give each request its next token; return the indices of those that go on."""
        largest = logits.argmax(dim=-1).tolist()
        remaining = []
        for index, request in enumerate(requests):
            token = largest[index]
            if not request.sampler.takes_argmax:
                token = request.sampler.draw(request.tokens, logits[index])
            self.new_tokens += 1
            if not request.add(token):
                remaining.append(index)
        return remaining

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows of the batch."""
        self.running = [self.running[index] for index in rows]
        if not rows or self._cache is None:
            self._cache = None
            return
        # The last token of a row is not in the cache yet.
        longest = max(len(request.tokens) - 1 for request in self.running)
        filter_rows(self._cache, rows, padding=self._cache.get_seq_length() - longest)

    def _log(self) -> None:
        since, tokens = self._logged
        now = time.monotonic()
        if now - since < LOG_INTERVAL:
            return
        self._logged = now, self.new_tokens
        rate = (self.new_tokens - tokens) / (now - since)
        logger.info("%.1f tokens a second; %s", rate, ", ".join(f"{k} {v}" for k, v in self.stats().items()))


def piece_ends(start: int, last: int, borders: Sequence[int], size: int) -> list[int]:
    """Return where the pieces of a prompt end that is read from `start` to `last`.

    A piece has at most `size` tokens and ends at a border if it can: at the first border of all, behind which other
    chats differ, and at the last one within reach.
    """
    ends = []
    while start < last:
        reach = min(start + size, last)
        within = [border for border in borders if start < border < reach]
        if within and within[0] == borders[0]:
            reach = within[0]
        elif within and reach < last:
            reach = within[-1]
        ends.append(reach)
        start = reach
    return ends


def _check_served(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raise where a model or a tokenizer cannot serve requests."""
    check_model(model)
    name = type(model).__name__
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{name} does not generate from a prompt. Load a decoder with its language modelling head.")
    if model.training:
        raise ValueError(f"This {name} is in training mode. Call model.eval() first.")
    if mixer := restarting_mixer(model):
        raise NotImplementedError(STATE_LOST.format(mixer, "several"))
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise NotImplementedError(f"{name} has layers with states ({names}) that cannot join a batch: use generate().")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"The engine needs a fast tokenizer, got {type(tokenizer).__name__}.")
