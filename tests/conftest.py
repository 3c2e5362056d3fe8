"""Settings of every test: offline, one thread, fixed seeds."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck), database=None
)
# A longer search, with other cases each time: HYPOTHESIS_PROFILE=search pytest ...
settings.register_profile("search", deadline=None, max_examples=500, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Let `patch_model`, which asks the garbage collector for models, not search all that was imported each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
