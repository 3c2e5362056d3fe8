"""The command: it serves, ends what runs on SIGTERM, and leaves whole files when it is killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from tests.small import patched
from tests.tiny_models import LLAMA
from tests.tiny_text import tiny_tokenizer

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    patched("window", LLAMA, exact_heads=[1]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def process(checkpoint: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """`hf-linear-attn serve` at a free port, killed at the end or after two minutes."""
    command = [sys.executable, "-m", "hf_linear_attn", "serve", str(checkpoint), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        timer = threading.Timer(120, running.kill)
        timer.start()
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            match = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+/v1)\n", line)
            assert match, line
            yield running, openai.OpenAI(base_url=match[1], api_key="none", max_retries=0, timeout=60)
        finally:
            timer.cancel()
            running.kill()


@pytest.mark.slow
def test_sigterm_ends_running_answers_and_the_process(checkpoint: Path) -> None:
    with process(checkpoint) as (running, client):
        answers = [
            client.completions.create(model="tiny", prompt=prompt, max_tokens=60, stream=True)
            for prompt in ("cat", "dog")
        ]
        iterators = [iter(answer) for answer in answers]
        first = [next(iterator) for iterator in iterators]
        running.send_signal(signal.SIGTERM)
        rest = [list(iterator) for iterator in iterators]
        assert [chunks[-1].choices[0].finish_reason for chunks in rest] == ["length", "length"]
        assert all(chunk.choices[0].text for chunk in first)
        assert running.wait(30) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
def test_a_killed_server_leaves_whole_files_that_the_next_one_takes_up(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [" ".join(["cat dog"] * count) for count in range(8, 24)]
    with process(checkpoint, "--prefix_dir", str(tmp_path)) as (running, client):
        client.completions.create(model="tiny", prompt=prompts[0], max_tokens=1, temperature=0)

        def ask() -> None:
            for prompt in prompts[1:]:
                try:
                    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
                except openai.APIConnectionError:
                    return

        asking = threading.Thread(target=ask)
        asking.start()
        while len(list(tmp_path.rglob("*.safetensors"))) < 4 and asking.is_alive():
            time.sleep(0.001)
        running.kill()
        asking.join(60)
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) >= 4
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (no dictionary)
    with process(checkpoint, "--prefix_dir", str(tmp_path)) as (_, client):
        client.completions.create(model="tiny", prompt=prompts[0], max_tokens=1)
    assert not list(tmp_path.rglob("*.part"))


def test_a_port_that_is_taken_is_an_error_in_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(checkpoint), "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert "Cannot listen at 127.0.0.1" in error
    assert "Traceback" not in error


def test_the_engine_is_part_of_the_package() -> None:
    import hf_linear_attn.serving

    assert hla.serving.Engine is hf_linear_attn.serving.Engine
    assert set(hla.serving.__all__) <= {*dir(hla.serving), *hla.serving._HOMES}
