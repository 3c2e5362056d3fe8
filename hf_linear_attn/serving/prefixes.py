"""Prefixes of prompts that were read once: their states are kept, so that the next prompt that begins so goes on there.

A state cannot be cut back to fewer tokens, so that what is kept are snapshots: at the end of a prompt, and where the
messages of a chat end.
"""

import copy
import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..integration.models import check_patched
from ..integration.state_files import fingerprint, load_state, save_state
from ..streaming import cache_bytes
from ..utils.files import remove_partial_files

logger = logging.getLogger(__name__)

Key = tuple[int, str]
"""The number of tokens of a prefix, and a digest of them."""

MEGABYTE = 1 << 20


class PrefixStore:
    """Snapshots of caches by the tokens that they have read, in memory and, if asked for, on disk.

    When the bound is reached, the snapshot goes that was not used for the longest time. When `longest` finds the model
    changed (weights, linear attention, adapters), all in memory go; on disk each model has a folder of its own.

    Args:
        model: The model that fills the caches.
        limit: The most bytes of all snapshots in memory, and as many on disk.
        folder: Where snapshots are written to (None: nowhere). Names of files there are made of digests only.

    Attributes:
        hits, misses: How many prompts began with a kept prefix, or with none.
        nbytes: The bytes of all snapshots in memory.
    """

    def __init__(self, model: PreTrainedModel, limit: int, folder: Path | None = None) -> None:
        if folder is not None:
            check_patched(model)
            folder.mkdir(parents=True, exist_ok=True)
        self.model, self.limit, self.folder = model, limit, folder
        self.hits = self.misses = self.nbytes = 0
        self._snapshots: OrderedDict[Key, tuple[Cache, int]] = OrderedDict()
        self._fingerprint = ""
        self._notice_changes()

    def longest(self, tokens: Sequence[int]) -> tuple[int, Cache]:
        """Return how many of the first tokens were read before, and a cache of its own that has read them.

        At least the last token remains to be read; an empty cache where nothing is kept.
        """
        self._notice_changes()
        keys = {*self._snapshots, *self._files()}
        for length in sorted({length for length, _ in keys if length < len(tokens)}, reverse=True):
            key = _key(tokens[:length])
            cache = self._take(key) if key in keys else None
            if cache is not None:
                self.hits += 1
                return length, cache
        self.misses += 1
        return 0, DynamicCache(config=self.model.config)

    def keep(self, tokens: Sequence[int], cache: Cache) -> None:
        """Keep a copy of a cache that has read these tokens, and nothing else, by the model that `longest` saw."""
        key = _key(tokens)
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return
        if cache_bytes(cache) > self.limit:
            return
        self._remember(key, copy.deepcopy(cache))
        if self.folder is not None:
            path = self._path(key)
            try:
                save_state(self.model, cache, path)
                self._limit_files()
            except OSError as error:
                logger.warning("A prefix of %d tokens is kept in memory only: %s", key[0], error)

    def _remember(self, key: Key, cache: Cache) -> None:
        size = cache_bytes(cache)
        self._snapshots[key] = cache, size
        self.nbytes += size
        while self.nbytes > self.limit:
            _, (_, freed) = self._snapshots.popitem(last=False)
            self.nbytes -= freed

    def _take(self, key: Key) -> Cache | None:
        """Return a copy of a snapshot, from memory or else from its file; None where that cannot be read."""
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return copy.deepcopy(self._snapshots[key][0])
        path = self._path(key)
        try:
            cache = load_state(self.model, path)
        except (ValueError, OSError) as error:
            logger.warning("The prefix %s cannot be read and is removed: %s", path.name, error)
            path.unlink(missing_ok=True)
            return None
        path.touch()
        self._remember(key, copy.deepcopy(cache))
        return cache

    def _notice_changes(self) -> None:
        """Forget what another model, or the model with other weights or adapters, has left."""
        current = fingerprint(self.model)
        if current == self._fingerprint:
            return
        self._fingerprint, self.nbytes = current, 0
        self._snapshots.clear()
        if self.folder is not None:
            self._path((0, "")).parent.mkdir(exist_ok=True)
            remove_partial_files(self._path((0, "")).parent)

    def _path(self, key: Key) -> Path:
        assert self.folder is not None
        return self.folder / self._fingerprint / f"{key[0]}-{key[1]}.safetensors"

    def _files(self) -> list[Key]:
        if self.folder is None:
            return []
        names = (path.stem.split("-") for path in self._path((0, "")).parent.glob("[0-9]*-*.safetensors"))
        return [(int(length), digest) for length, digest in names]

    def _limit_files(self) -> None:
        """Remove the files of any model that were not used for the longest time, until the rest is within the bound."""
        assert self.folder is not None
        files = [(path.stat(), path) for path in self.folder.glob("*/[0-9]*-*.safetensors")]
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda entry: entry[0].st_mtime_ns):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


def _key(tokens: Sequence[int]) -> Key:
    return len(tokens), hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()
