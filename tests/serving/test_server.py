"""The server, asked over a real socket of the loopback interface by the `openai` client and by bare requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

from hf_linear_attn.serving import Engine  # noqa: E402
from hf_linear_attn.serving.options import ServeConfig  # noqa: E402
from hf_linear_attn.serving.server import MAX_BODY, build_app  # noqa: E402
from tests.serving.conftest import greedy_answer  # noqa: E402
from tests.small import patched  # noqa: E402
from tests.tiny_models import LLAMA  # noqa: E402
from tests.tiny_text import tiny_tokenizer  # noqa: E402

TEMPLATE = "{% for message in messages %}{{ message['content'] }} [SEP] {% endfor %}{{ mark or '' }}"
PROMPT = "alpha beta gamma cat dog"


@pytest.fixture(scope="module")
def model() -> Any:
    return patched("window", LLAMA, exact_heads=[1])


@contextmanager
def server(model: Any, *, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[SimpleNamespace]:
    """A server in a thread; it ends with the block."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = ServeConfig("tiny", max_new_tokens=64, **options)
    with socket.socket() as listener, Engine(model, tokenizer, **{"chunk_length": 8, **(engine or {})}) as running:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app: Any = build_app(running, "tiny", config)
        served = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=lambda: asyncio.run(served.serve([listener])), daemon=True)
        thread.start()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            yield SimpleNamespace(url=url, client=client, engine=running, tokenizer=tokenizer, config=config)
        finally:
            client.close()
            served.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def running(model: Any) -> Iterator[SimpleNamespace]:
    with server(model) as served:
        yield served


def expected_text(served: SimpleNamespace, prompt: str, count: int) -> str:
    ids = served.tokenizer(prompt)["input_ids"]
    return served.tokenizer.decode(greedy_answer(served.engine.model, ids, count), skip_special_tokens=True)


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(url: str, body: bytes, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(condition: Any) -> None:
    """Wait, for half a minute at most."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_completion_is_what_the_model_answers(running: SimpleNamespace) -> None:
    answer = running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.choices[0].text.strip() == expected_text(running, PROMPT, 6)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 6)


def test_a_chat_answers_at_once_or_as_a_stream(running: SimpleNamespace) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}
    whole = running.client.chat.completions.create(**chat)
    chunks = list(running.client.chat.completions.create(stream=True, **chat))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    ids = running.tokenizer(f"{PROMPT} [SEP]", add_special_tokens=False)["input_ids"]
    expected = running.tokenizer.decode(greedy_answer(running.engine.model, ids, 6), skip_special_tokens=True)
    assert whole.choices[0].message.content.strip() == streamed.strip() == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_newer_interface_answers_the_same(running: SimpleNamespace) -> None:
    answer = running.client.responses.create(
        model="tiny", input=PROMPT, max_output_tokens=6, temperature=0, stream=False
    )
    chat = running.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=6, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content


def test_many_clients_get_their_own_answers(running: SimpleNamespace) -> None:
    prompts = ["cat", "dog bird", "river stone sea", "one two three four", "sky"]
    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        answer = running.client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        answers[prompt] = answer.choices[0].text.strip()

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {prompt: expected_text(running, prompt, 8) for prompt in prompts}


def test_seeds_belong_to_requests(running: SimpleNamespace) -> None:
    drawn = [
        running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=1.5, seed=seed)
        .choices[0]
        .text
        for seed in (3, 4, 3)
    ]
    assert drawn[0] == drawn[2] != drawn[1]


def test_an_answer_ends_before_a_stop_string(running: SimpleNamespace) -> None:
    whole = expected_text(running, PROMPT, 12)
    stop = whole[len(whole) // 2 :][:4]
    answer = running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text.strip() == whole[: whole.index(stop)].strip()
    assert answer.choices[0].finish_reason == "stop"


def test_the_length_of_answers_is_bounded(running: SimpleNamespace) -> None:
    answer = running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10_000, temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (64, "length")


@pytest.mark.parametrize("stream", [True, False])
def test_the_row_of_a_client_that_leaves_is_freed(model: Any, stream: bool) -> None:
    with server(model) as served:
        body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 64, "stream": stream}).encode()
        host, port = served.url.removeprefix("http://").split(":")
        slow = served.engine._step
        served.engine._step = lambda: (time.sleep(0.05), slow())
        with socket.create_connection((host, int(port))) as connection:
            lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
            connection.sendall(head.encode() + body)
            wait_until(lambda: served.engine.running)
        wait_until(lambda: not served.engine.running)
        assert served.engine.new_tokens < 60
        assert get(f"{served.url}/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(model: Any) -> None:
    with server(model, engine={"max_batch": 1, "max_queue": 1}) as served:
        slow = served.engine._step
        served.engine._step = lambda: (time.sleep(0.02), slow())
        first = served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=64, stream=True)
        next(iter(first))
        second = served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
        assert int(refused.value.response.headers["Retry-After"]) > 0
        first.close()
        assert len(list(second)) >= 1
        served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "cat " * 200}, "The prompt has 202 tokens; 95 fit"),
        ({"n": 2}, "n=2 is not served"),
        ({"logprobs": 3}, "logprobs=3 is not served"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed must be"),
        ({"extra_body": {"generation_config": '{"num_beams": 4}'}}, "num_beams=4 is not served"),
        ({"extra_body": {"generation_config": "not JSON"}}, "JSONDecodeError"),
        ({"model": "../../etc"}, "pinned to 'tiny'"),
        ({"prompt": ["a", "b"]}, "prompt must be a string"),
    ],
)
def test_what_cannot_be_served_is_refused(running: SimpleNamespace, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        running.client.completions.create(**{"model": "tiny", "prompt": PROMPT, **options})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user"}, 3]},
        {"messages": "hello"},
        {},
        {"messages": [{"role": "user", "content": "cat"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"messages": [{"role": "user", "content": "cat"}], "temperature": "hot"},
    ],
)
def test_bad_chats_are_refused(running: SimpleNamespace, body: dict[str, Any]) -> None:
    status, _ = post(f"{running.url}/v1/chat/completions", json.dumps(body).encode())
    assert status == 400


def test_variables_of_the_chat_template_reach_it(running: SimpleNamespace) -> None:
    chat = {"messages": [{"role": "user", "content": "cat"}], "max_tokens": 1, "chat_template_kwargs": {"mark": "sky"}}
    status, answer = post(f"{running.url}/v1/chat/completions", json.dumps(chat).encode())
    assert (status, json.loads(answer)["usage"]["prompt_tokens"]) == (200, 3)


def test_bodies_that_are_no_requests_are_refused(running: SimpleNamespace) -> None:
    url = f"{running.url}/v1/completions"
    assert post(url, b"{not json")[0] == 422
    assert post(url, b"[1, 2]")[0] == 422
    assert post(url, json.dumps({"prompt": "cat", "no_such": 1}).encode())[0] == 422
    assert post(url, b" " * (MAX_BODY + 1))[0] == 413


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/docs"])
def test_routes_that_reach_models_or_files_are_closed(running: SimpleNamespace, path: str) -> None:
    assert post(f"{running.url}{path}", b'{"model": "/etc/passwd"}')[0] == 404
    assert running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).choices


def test_models_health_and_metrics_can_be_seen(running: SimpleNamespace) -> None:
    assert [model.id for model in running.client.models.list()] == ["tiny"]
    assert json.loads(get(f"{running.url}/health")[1]) == {"status": "ok"}
    before = running.engine.requests
    running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
    status, text = get(f"{running.url}/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert (status, int(lines["hla_requests_total"])) == (200, before + 1)
    assert "# TYPE hla_requests_total counter" in text
    assert int(lines["hla_prefix_bytes"]) > 0


def test_a_dead_engine_is_not_healthy(model: Any) -> None:
    with server(model) as served:
        served.engine.close()
        assert get(f"{served.url}/health")[0] == 503


def test_a_key_is_needed_where_one_is_set(model: Any) -> None:
    with server(model, api_key="sécret") as served:
        for key in ("none", "s", "sécret-and-more"):
            assert get(f"{served.url}/v1/models", Authorization=f"Bearer {key}".encode().decode("latin-1"))[0] == 401
        assert get(f"{served.url}/v1/models")[0] == 401
        assert get(f"{served.url}/metrics")[0] == 401
        assert get(f"{served.url}/health")[0] == 200
        assert get(f"{served.url}/v1/models", Authorization="Bearer sécret".encode().decode("latin-1"))[0] == 200


def test_pages_of_other_origins_are_let_in_only_if_asked(model: Any, running: SimpleNamespace) -> None:
    def allowed(url: str) -> str | None:
        request = urllib.request.Request(f"{url}/v1/models", headers={"Origin": "http://elsewhere"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.headers["access-control-allow-origin"]

    assert allowed(running.url) is None
    with server(model, cors=True) as served:
        assert allowed(served.url) is not None
