"""The screen of an evaluation: tables at any width, stages with their rows and time left."""

from __future__ import annotations

import io
import time

import pandas as pd
import pytest
from rich.console import Console

from hf_linear_attn.utils import progress
from hf_linear_attn.utils.progress import ConsoleProgress, LineProgress


@pytest.mark.parametrize("width", range(40, 121, 8))
def test_a_table_of_any_width_shows_every_value(width: int) -> None:
    titles = ["perplexity", "perplexity change", "KL, nats", "output error", "learned parameters", "at 128"]
    values = [f"{index}.75 → {index}.76" for index in range(len(titles))]
    frame = pd.DataFrame([values], index=["without attention"], columns=titles)
    frame.index.name = "attention"
    stream = io.StringIO()
    ConsoleProgress(Console(file=stream, width=width)).table(frame)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for word in (*values, *(word for title in titles for word in title.split())):
        assert word in text


def test_a_stage_shows_rows_and_time_left() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True)
    with ConsoleProgress(console) as progress:
        for done in range(4):
            progress.status("hedgehog (4 of 4): attention transfer, loss 0.246", done, 30)
        progress._bar.refresh()
        progress.log("hedgehog: perplexity 3.20")
    text = stream.getvalue()
    assert "hedgehog (4 of 4)" in text
    assert "3/30" in text
    assert "left" in text
    assert "hedgehog: perplexity 3.20" in text


def test_an_error_ends_what_is_being_done() -> None:
    progress = LineProgress(Console(file=io.StringIO()))
    with pytest.raises(ValueError, match="in between, while measuring speed"), progress.working("measuring speed"):
        raise ValueError(f"in between, {progress.doing}")
    assert progress.doing == "between two stages"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_log_gets_a_line_every_minute_and_a_terminal_a_bar(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with ConsoleProgress(Console(file=stream, width=80, force_terminal=is_terminal)) as screen:
        screen.status("timing window", 3, 9)
        deadline = time.monotonic() + (0.0 if is_terminal else 20.0)
        while "... timing window, 3 of 9" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ("... timing window, 3 of 9\n" in stream.getvalue()) != is_terminal
