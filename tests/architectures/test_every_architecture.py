"""A tiny random model of every architecture of Transformers, patched and checked.

`pytest -m architectures -n 2` takes some twenty minutes on two cores. With `--architectures-table FILE.md` it also
tries the architectures that could not be built before, and writes the table with its JSON (see `conftest.py`); of a
part of the architectures, chosen by `-k`, it renews the rows.
Each case works, is refused with a message that says what would be needed, or cannot be built tiny; none may be wrong.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from hf_linear_attn.integration import trial
from tests.architectures.models import cases_of
from tests.architectures.properties import FOR_TERMS, UNBUILT, WORKS, WRONG, Result, examine

MECHANISMS = ("elu", "hedgehog")
#: Longest time of one model type.
MAX_SECONDS = 300.0
#: A case may not take more memory: a field of its config was missed then.
MAX_BYTES = 6 << 30
SAVED = Path(__file__).parents[2] / "recipes" / "results" / "architectures.json"

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="The cases run in forked processes.")


SAVED_TABLE = json.loads(SAVED.read_text(encoding="utf-8"))
#: Case -> its row in the committed table, which may be of another version of Transformers.
SAVED_ROWS = {row["case"]: row for row in SAVED_TABLE["results"] if {MECHANISMS[0], FOR_TERMS} & set(row["attention"])}
IS_SAME_VERSION = SAVED_TABLE["environment"]["versions"]["transformers"] == transformers.__version__


def lost_checks(result: Result, saved: dict[str, Any]) -> list[str]:
    """The checks that a case passed when the committed table was made, and does not pass now."""
    others = {name for names in saved.get("checks", {}).values() for name in names}
    return [f"{name} {text}" for name, text in result.checks.items() if text != "passed" and name not in others]


def examine_and_send(model_type: str, sender: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        os.dup2(null, stream.fileno())
    nothing_known = {"_table": lambda: frozenset(), "_problem_file": lambda *_: None}
    with mock.patch.multiple(trial, **nothing_known):
        sender.send([result for case in cases_of(model_type) for result in examine(case, MECHANISMS)])


def examine_isolated(model_type: str, target: Any = examine_and_send, seconds: float = MAX_SECONDS) -> list[Result]:
    """The results of a model type from a process of its own, which may crash or run too long."""
    context = multiprocessing.get_context("fork")  # the child has Transformers imported already
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return [Result(model_type, MECHANISMS[0], UNBUILT, f"takes longer than {seconds:g} s", seconds=seconds)]
        return receiver.recv()
    except EOFError:
        process.join()
        return [Result(model_type, MECHANISMS[0], WRONG, f"the process ended with exit code {process.exitcode}")]
    finally:
        process.kill()
        process.join()


@needs_fork
@pytest.mark.architectures
@pytest.mark.parametrize("model_type", CONFIG_MAPPING_NAMES)
def test_architecture(model_type: str, request: pytest.FixtureRequest, record_property: Any) -> None:
    is_unbuilt = IS_SAME_VERSION and SAVED_ROWS.get(model_type, {}).get("outcome") == UNBUILT
    if is_unbuilt and not request.config.getoption("--architectures-table", None):
        pytest.skip("The committed table says that it cannot be built tiny.")
    results = examine_isolated(model_type)
    for result in results:
        record_property("architecture", asdict(result))
    bad = [f"{result.case} with {result.attention}: {result.detail}" for result in results if result.outcome == WRONG]
    for result in results:
        saved = SAVED_ROWS.get(result.case, {})
        if saved.get("outcome") == WORKS and result.outcome != WRONG:
            lost = lost_checks(result, saved) if result.outcome == WORKS else [result.detail]
            bad += [f"{result.case} with {result.attention} worked before: {text}" for text in lost]
    assert not bad, "\n".join(bad)
    if {result.outcome for result in results} == {UNBUILT}:
        pytest.skip(results[0].detail)


def crash(model_type: str, sender: Any) -> None:
    os._exit(11)


def run_forever(model_type: str, sender: Any) -> None:
    time.sleep(60)


@needs_fork
def test_a_crash_or_an_endless_case_is_a_result() -> None:
    (crashed,) = examine_isolated("bart", crash)
    assert (crashed.outcome, crashed.detail) == (WRONG, "the process ended with exit code 11")
    (endless,) = examine_isolated("vit", run_forever, seconds=0.5)
    assert (endless.outcome, endless.detail) == (UNBUILT, "takes longer than 0.5 s")


def test_a_check_that_no_longer_applies_is_lost() -> None:
    saved = {"checks": {"n/a": ["generate"], "refused": ["cache"]}}
    checks = {"decode by token": "n/a: forward takes no cache", "generate": "n/a: it does not", "backward": "passed"}
    assert lost_checks(Result("llama", "elu", checks=checks), saved) == ["decode by token n/a: forward takes no cache"]
    assert lost_checks(Result("llama", "elu", checks=checks), {}) != []
