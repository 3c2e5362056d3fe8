"""Settings of every test: offline, one thread, fixed seeds."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings

from hf_linear_attn.ops import common, window_blocks
from tests.sampling import mark_all_but_a_sample

#: Folders whose tests have many cases -> of how many cases of a test the quick suite runs one.
SAMPLED = {"endurance": 6, "feature_maps": 4, "integration": 8, "matrix": 12, "mechanisms": 6, "ops": 3}

settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck), database=None
)
# A longer search, with other cases each time: HYPOTHESIS_PROFILE=search pytest ...
settings.register_profile("search", deadline=None, max_examples=500, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
torch.set_num_threads(1)
logging.getLogger("torch.__trace").disabled = True  # a log of every trace, which pytest would collect for minutes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampled = [item for item in items if item.path.name != "test_gpu.py"]  # which a GPU runs whole
    for folder, every in SAMPLED.items():
        mark_all_but_a_sample(sampled, Path(__file__).parent / folder, every)


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """Let nothing search all that was imported each time.

    `patch_model` asks the garbage collector for models, the Trainer collects garbage after each training, and so does
    whatever measures memory.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernelized attention have blocks of 16 tokens: every block loop runs."""
    monkeypatch.setattr(common, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(common, "BLOCK_QUANTUM", 16)


@pytest.fixture
def small_window_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows have groups of a few short blocks."""
    for name, value in {"MIN_BLOCK": 4, "MAX_BLOCK": 8, "MIN_GROUP": 2, "GROUP_ELEMENTS": 1}.items():
        monkeypatch.setattr(window_blocks, name, value)
