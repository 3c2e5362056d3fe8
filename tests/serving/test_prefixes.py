"""Kept prefixes: found again, never wrong, within their bounds, in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import DynamicCache

from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.serving.prefixes import PrefixStore
from hf_linear_attn.streaming import cache_bytes
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.serving.conftest import engine, greedy_answer
from tests.small import on_the_grid, patched
from tests.tiny_models import LLAMA, VOCABULARY

#: An end-of-sequence token ends messages; the tiny tokenizer has none, so that the model's config says it.
END = 5


def small_model(**options: Any) -> Any:
    model = patched("window", LLAMA, exact_heads=[1], **options)
    model.generation_config.eos_token_id = END
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def message(seed: int, length: int = 12) -> list[int]:
    return [token if token != END else token + 1 for token in token_ids(1, length, seed)[0].tolist()]


def answer(running: Any, prompt: list[int]) -> Any:
    request = running.submit(prompt, do_sample=False, max_new_tokens=6, eos_token_id=VOCABULARY)
    request.result()
    return request


@pytest.mark.parametrize("kind", ["mixture", "int8", "exact"])
def test_the_second_turn_of_a_chat_goes_on_where_the_first_ended(kind: str) -> None:
    model: Any = {
        "mixture": small_model,
        "int8": lambda: on_the_grid(small_model(cache_dtype="int8")),
        "exact": LLAMA.build,
    }[kind]()
    first = message(1)
    with engine(model) as running:
        reply = answer(running, first)
        second = [*first, *reply.answer, END, *message(2)]
        again = answer(running, second)
        assert (reply.cached, again.cached) == (0, len(first) - 1)
        assert again.answer == greedy_answer(model, second, 6)
        same = answer(running, second)
        assert (same.cached, same.answer) == (len(second) - 1, again.answer)
        assert (running.prefixes.hits, running.prefixes.misses) == (2, 1)


def test_chats_share_the_first_message_and_no_more(model: Any) -> None:
    system = [*message(3), END]
    with engine(model) as running:
        answer(running, [*system, *message(4)])
        other = [*system, *message(5)]
        request = answer(running, other)
        assert (request.cached, request.answer) == (len(system), greedy_answer(model, other, 6))
        request = answer(running, [*message(3, 11), 9, END, *message(4)])
        assert request.cached == 0


def test_a_kept_prefix_is_not_changed_by_who_takes_it_up(model: Any) -> None:
    first = message(1)
    with engine(model) as running:
        answer(running, first)
        answers = {tuple(answer(running, [*first, *message(seed, 3)]).answer) for seed in (7, 8, 7, 8)}
        assert answers == {tuple(greedy_answer(model, [*first, *message(seed, 3)], 6)) for seed in (7, 8)}


def test_without_memory_for_prefixes_none_is_kept(model: Any) -> None:
    with engine(model, prefix_cache_mb=0) as running:
        answer(running, message(1))
        assert answer(running, message(1)).cached == 0
        assert running.stats()["prefix_bytes"] == 0


def read(model: Any, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits(model, torch.tensor([tokens]), **cache_argument(model, cache))
    return cache


def test_the_prefix_goes_that_was_not_used_for_the_longest_time(model: Any) -> None:
    rows = [message(seed) for seed in range(3)]
    caches = [read(model, row) for row in rows]
    store = PrefixStore(model, 2 * cache_bytes(caches[0]))
    store.keep(rows[0], caches[0])
    store.keep(rows[1], caches[1])
    assert store.longest([*rows[0], 9])[0] == 12
    store.keep(rows[2], caches[2])
    assert [store.longest([*row, 9])[0] for row in rows] == [12, 0, 12]
    assert store.nbytes == 2 * cache_bytes(caches[0])
    PrefixStore(model, 10).keep(rows[0], caches[0])  # larger than the bound: not kept, and nothing else removed


def switch_adapters(model: Any, on: bool) -> None:
    for part in model.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(on)


@pytest.mark.parametrize("change", ["weights", "linear attention", "adapter", "adapter off"])
def test_a_changed_model_takes_up_no_prefix_of_before(change: str) -> None:
    model, row = small_model(), message(1)
    if "adapter" in change:
        inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)
        switch_adapters(model, change == "adapter off")
    store = PrefixStore(model, 1 << 20)
    store.keep(row, read(model, row))
    assert store.longest([*row, 9])[0] == 12
    if change == "weights":
        model.model.layers[0].mlp.up_proj.weight.data += 0.1
    elif change == "linear attention":
        model.model.layers[0].self_attn.linear_attention.mechanism.log_mix.data += 0.1
    else:
        switch_adapters(model, change == "adapter")
    assert store.longest([*row, 9])[0] == 0
    assert store.nbytes == 0


def test_prefixes_on_disk_outlive_the_process_and_belong_to_one_model(model: Any, tmp_path: Path) -> None:
    first, second = message(1), [*message(1), *message(2)]
    with engine(model, prefix_dir=tmp_path) as running:
        answer(running, first)
    with engine(model, prefix_dir=tmp_path) as running:
        request = answer(running, second)
        assert (request.cached, request.answer) == (len(first) - 1, greedy_answer(model, second, 6))
    other = small_model()
    other.model.layers[0].mlp.up_proj.weight.data += 0.1
    with engine(other, prefix_dir=tmp_path) as running:
        assert answer(running, second).cached == 0
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert all(name.removesuffix(".safetensors").replace("-", "").isalnum() for name in names)


def test_a_broken_file_is_no_prefix_and_is_removed(model: Any, tmp_path: Path) -> None:
    row = message(1)
    PrefixStore(model, 1 << 20, tmp_path).keep(row, read(model, row))
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    partial = path.with_name(f".{path.name}.0123abcd.part")
    partial.write_bytes(b"left by a process that was killed")
    store = PrefixStore(model, 1 << 20, tmp_path)
    assert store.longest([*row, 9])[0] == 0
    assert not path.exists()
    assert not partial.exists()


def test_files_stay_within_the_bound(model: Any, tmp_path: Path) -> None:
    rows = [message(seed) for seed in range(4)]
    caches = [read(model, row) for row in rows]
    store = PrefixStore(model, 1 << 20, tmp_path)
    store.keep(rows[0], caches[0])
    size = next(tmp_path.rglob("*.safetensors")).stat().st_size
    store.limit = 2 * size + size // 2
    for row, cache in zip(rows[1:], caches[1:], strict=True):
        store.keep(row, cache)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    again = PrefixStore(model, 1 << 20, tmp_path)
    assert [again.longest([*row, 9])[0] for row in rows] == [0, 0, 12, 12]


def test_a_file_gives_the_state_that_was_saved(model: Any, tmp_path: Path) -> None:
    row = message(1)
    PrefixStore(model, 1 << 20, tmp_path).keep(row, read(model, row))
    _, cache = PrefixStore(model, 1 << 20, tmp_path).longest([*row, 9])
    out = logits(model, torch.tensor([[9]]), **cache_argument(model, cache))
    assert_close(out[:, -1], logits(model, torch.tensor([[*row, 9]]), use_cache=False)[:, -1])


def test_prefixes_of_an_exact_model_stay_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not patched"):
        PrefixStore(LLAMA.build(), 1 << 20, tmp_path)
