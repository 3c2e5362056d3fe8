"""Runs the architecture sweep: a process and a time limit for every case, every result on disk at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .sweep import UNBUILT, WRONG, Result, sweep_case
from .tiny import Case

#: A case may not take more memory than this (where the system can limit it): a field was missed then.
MOST_BYTES = 6 << 30


@dataclass
class _Running:
    process: BaseProcess
    case: Case
    attention: str
    started: float
    receiver: Any


def run_sweep(
    cases: Iterable[tuple[Case, str]],
    journal: Path,
    *,
    processes: int = 2,
    seconds: float = 60.0,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Results of all cases with their mechanism, those of an interrupted run included.

    Args:
        cases: pairs of case and mechanism.
        journal: a file that gets every result as one line of JSON as soon as it is there; what it holds is not run
            again.
        processes: how many cases run at the same time.
        seconds: time limit of one case.
        on_result: called with every new result.
    """
    results = read_journal(journal)
    done = {(result.case, result.attention) for result in results}
    waiting = [(case, attention) for case, attention in cases if (str(case), attention) not in done]
    waiting.reverse()
    running: list[_Running] = []
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    running.append(_start(*waiting.pop()))
                time.sleep(0.01)
                for one in list(running):
                    result = _finished(one, seconds)
                    if result is None:
                        continue
                    running.remove(one)
                    file.write(json.dumps(result.to_dict(), ensure_ascii=False) + "\n")
                    file.flush()
                    results.append(result)
                    if on_result is not None:
                        on_result(result)
        finally:
            for one in running:
                one.process.kill()
    return results


def read_journal(path: Path) -> list[Result]:
    """What an interrupted run left. A last line that was cut off is dropped from the file, too."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    names = {field.name for field in fields(Result)}
    rows = [json.loads(line) for line in whole.splitlines()]
    return [Result(**{name: value for name, value in row.items() if name in names}) for row in rows]


def _start(case: Case, attention: str) -> _Running:
    # A forked process has Transformers imported already; without fork, each imports it anew (seconds).
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, attention, sender), daemon=True)  # type: ignore[attr-defined]
    process.start()
    sender.close()
    return _Running(process, case, attention, time.monotonic(), receiver)


def _work(case: Case, attention: str, sender: Any) -> None:
    import torch
    from transformers.utils import logging

    _limit_memory()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silent, stream.fileno())
    sender.send(sweep_case(case, attention).to_dict())


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def _finished(one: _Running, seconds: float) -> Result | None:
    """The result of a case that has ended, crashed or run too long; None while it runs."""
    try:
        if one.receiver.poll():
            result = Result(**one.receiver.recv())
            one.process.join()
            return result
    except EOFError:
        one.process.join()
        detail = f"the process ended with exit code {one.process.exitcode}"
        return Result(str(one.case), one.attention, WRONG, detail)
    spent = time.monotonic() - one.started
    if spent < seconds:
        return None
    one.process.kill()
    one.process.join()
    return Result(str(one.case), one.attention, UNBUILT, f"takes longer than {seconds:g} s", seconds=round(spent, 1))
