"""The engine: each request is answered as if it were alone, whoever joins and leaves beside it."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from hf_linear_attn.serving import Engine, QueueFullError
from hf_linear_attn.serving.engine import piece_ends
from hf_linear_attn.serving.requests import CancelledRequestError
from tests.cases import every_mechanism
from tests.serving.conftest import engine, greedy_answer, prompts
from tests.small import on_the_grid, patched
from tests.tiny_models import BERT, GPT2, LLAMA, tiny_model
from tests.tiny_text import tiny_tokenizer


def check_answers(model: Any) -> None:
    expected = [greedy_answer(model, prompt) for prompt in prompts()]
    with engine(model, max_batch=3) as running:
        requests = [running.submit(prompt, max_new_tokens=8, do_sample=False) for prompt in prompts()]
        for request in requests:
            request.result()
    assert [request.answer for request in requests] == expected
    assert [request.finish_reason for request in requests] == ["length"] * len(expected)
    assert running.stats()["state_bytes"] == 0


#: The states of the other mechanisms have the forms of these.
QUICK = ("gated-delta", "gla", "linformer-causal", "window")


@pytest.mark.parametrize("name", QUICK)
def test_answers_are_those_of_each_request_alone(name: str) -> None:
    check_answers(patched(name, GPT2 if name == "gla" else LLAMA))


@pytest.mark.slow
@every_mechanism(causal=True)
def test_answers_by_any_mechanism_are_those_of_each_request_alone(name: str) -> None:
    check_answers(patched(name, GPT2 if name in ("gla", "luna") else LLAMA))


MIXTURES: dict[str, dict[str, Any]] = {
    "exact heads": {"exact_heads": [1]},
    "exact layer": {"layers": [1]},
    "int8": {"exact_heads": [0], "cache_dtype": "int8"},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_answers_of_mixtures_are_those_of_each_request_alone(name: str) -> None:
    model = patched("window", LLAMA, **MIXTURES[name])
    check_answers(on_the_grid(model) if name == "int8" else model)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
def test_answers_of_exact_models_are_those_of_each_request_alone(architecture: str) -> None:
    """Mistral with a sliding window, OPT with positions that begin at 2."""
    check_answers(tiny_model(architecture, **({"sliding_window": 4} if architecture == "mistral" else {})))


@pytest.fixture(scope="module")
def model() -> Any:
    return patched("window", LLAMA, exact_heads=[1])


def test_rows_have_options_and_seeds_of_their_own(model: Any) -> None:
    prompt = prompts()[0]
    drawn = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12}
    with engine(model) as running:
        first = running.submit(prompt, seed=7, **drawn)
        greedy = running.submit(prompt, do_sample=False, max_new_tokens=12)
        other = running.submit(prompt, seed=8, **drawn)
        penalty = running.submit(prompt, do_sample=False, repetition_penalty=5.0, max_new_tokens=12)
        again = running.submit(prompt, seed=7, **drawn)
        answers = []
        for request in (first, greedy, other, penalty, again):
            request.result()
            answers.append(request.answer)
    assert answers[0] == answers[4] != answers[2]
    assert answers[1] == greedy_answer(model, prompt, 12)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, repetition_penalty=5.0, max_new_tokens=12)[
        0, len(prompt) :
    ]
    assert answers[3] == expected.tolist() != answers[1]


def test_what_is_drawn_has_the_distribution_of_the_logits(model: Any) -> None:
    """Of 150 draws with two candidates, the likelier one comes about as often as softmax says."""
    prompt = prompts()[3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    top = logits.topk(2)
    share = float(top.values.softmax(0)[0])
    with engine(model, max_queue=150) as running:
        requests = [running.submit(prompt, seed=s, do_sample=True, top_k=2, max_new_tokens=1) for s in range(150)]
        for request in requests:
            request.result()
    counts = [request.answer[0] for request in requests]
    assert set(counts) <= set(top.indices.tolist())
    assert abs(counts.count(int(top.indices[0])) / 150 - share) < 5 * (share * (1 - share) / 150) ** 0.5


def test_an_answer_ends_before_a_stop_string_wherever_tokens_end(model: Any) -> None:
    prompt = prompts()[0]
    with engine(model) as running:
        whole = running.submit(prompt, do_sample=False, max_new_tokens=12).result()
        middle = whole[len(whole) // 2 - 3 : len(whole) // 2 + 3]
        request = running.submit(prompt, do_sample=False, max_new_tokens=12, stop_strings=["not there", middle])
        pieces = list(request)
    assert "".join(pieces) == request.text == whole[: whole.index(middle)]
    assert request.finish_reason == "stop"


def test_an_answer_ends_with_the_end_token_of_its_config(model: Any) -> None:
    prompt = prompts()[0]
    end = greedy_answer(model, prompt)[3]
    with engine(model) as running:
        request = running.submit(prompt, do_sample=False, eos_token_id=end, max_new_tokens=8)
        request.result()
    first = greedy_answer(model, prompt).index(end)
    assert (request.answer, request.finish_reason) == (greedy_answer(model, prompt)[: first + 1], "stop")


def test_a_cancelled_request_frees_its_row_and_disturbs_nobody(model: Any) -> None:
    with engine(model, max_batch=2) as running:
        endless = running.submit(prompts()[2], do_sample=False, max_new_tokens=80)
        other = running.submit(prompts()[0], do_sample=False, max_new_tokens=60)
        waiting = running.submit(prompts()[3], do_sample=False, max_new_tokens=8)
        never = running.submit(prompts()[4], do_sample=False, max_new_tokens=8)
        never.cancel()
        next(iter(endless))
        endless.cancel()
        with pytest.raises(CancelledRequestError):
            endless.result()
        with pytest.raises(CancelledRequestError):
            never.result()
        waiting.result()
        other.result()
    assert waiting.answer == greedy_answer(model, prompts()[3])
    assert other.answer == greedy_answer(model, prompts()[0], 60)
    assert len(endless.answer) < 80
    assert never.answer == []
    assert endless.finish_reason == "cancelled"


def test_leaving_a_stream_frees_its_row(model: Any) -> None:
    with engine(model) as running:
        stream = running.stream(prompts()[0], do_sample=False, max_new_tokens=60)
        next(stream)
        stream.close()
        running.submit(prompts()[2], max_new_tokens=1).result()
    assert running.new_tokens < 60


def test_a_long_prompt_does_not_stop_the_others(model: Any) -> None:
    """Between two tokens of a row at most one piece of another prompt is read."""
    read: list[int] = []
    joined = threading.Event()

    def listen(event: Any) -> None:
        read.append(running.prompt_tokens)
        joined.set()

    with engine(model) as running:
        row = running.submit(prompts()[4], do_sample=False, max_new_tokens=30, listener=listen)
        joined.wait(30)
        long = running.submit(prompts((60,))[0], do_sample=False, max_new_tokens=2)
        long.result()
    assert row.finish_reason == "length"
    assert long.answer == greedy_answer(model, prompts((60,))[0], 2)
    steps = [after - before for before, after in itertools.pairwise(read)]
    assert max(steps) == 8
    assert steps.count(8) >= 7


def test_a_full_queue_refuses_and_takes_requests_again(model: Any) -> None:
    with engine(model, max_batch=1, max_queue=1) as running:
        first = running.submit(prompts()[0], max_new_tokens=60)
        next(iter(first))
        waiting = running.submit(prompts()[2], max_new_tokens=1)
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            running.submit(prompts()[2], max_new_tokens=1)
        waiting.result()
        running.submit(prompts()[2], max_new_tokens=1).result()
    with pytest.raises(RuntimeError, match="closed"):
        running.submit(prompts()[2])


def test_a_step_that_fails_ends_its_rows_and_not_the_engine() -> None:
    model: Any = patched("hedgehog", LLAMA)
    forward, calls = model.forward, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise FloatingPointError("of this test")
        return forward(*args, **kwargs)

    expected = greedy_answer(model, prompts()[2])
    with engine(model, prefix_cache_mb=0) as running:
        model.forward = failing
        with pytest.raises(FloatingPointError, match="of this test"):
            running.submit(prompts()[2], do_sample=False, max_new_tokens=8).result()
        request = running.submit(prompts()[2], do_sample=False, max_new_tokens=8)
        request.result()
        assert request.answer == expected
        assert running.is_alive()


def test_an_engine_that_ends_by_an_error_leaves_nobody_waiting(model: Any) -> None:
    def failing() -> None:
        raise MemoryError("of this test")

    with engine(model) as running:
        running._drop_cancelled = failing  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="of this test"):
            running.submit(prompts()[2]).result()
        with pytest.raises(RuntimeError, match="closed"):
            running.submit(prompts()[2])
        assert not running.is_alive()


def test_the_log_gets_a_line_at_intervals(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_linear_attn.serving.engine.LOG_INTERVAL", 0.01)
    expected = "tokens a second; requests_total 1, prompt_tokens_total 4, generated_tokens_total 3"
    with caplog.at_level("INFO", "hf_linear_attn"), engine(model) as running:
        running.submit(prompts()[2], max_new_tokens=3).result()
        end = time.monotonic() + 30
        while not any(expected in record.getMessage() for record in caplog.records):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_an_answer_ends_where_the_model_has_no_more_positions(model: Any) -> None:
    with engine(model) as running:  # 96 positions
        request = running.submit(prompts((90,))[0], do_sample=False, max_new_tokens=60)
        request.result()
        assert (len(request.answer), request.finish_reason) == (6, "length")
        with pytest.raises(ValueError, match="The prompt has 96 tokens; 95 fit"):
            running.submit(prompts((96,))[0])


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ValueError, "prompt is empty"),
        ([3, 61], {}, ValueError, "ids outside of 0 to 60"),
        ([3], {"num_beams": 2}, NotImplementedError, "num_beams=2 is not served"),
        ([3], {"no_such": 2}, TypeError, "Unknown options: no_such"),
        ([3], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ([3], {"stop_strings": ["end", ""]}, ValueError, "stop_strings must be"),
        ([3], {"do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
        ([3], {"do_sample": True, "top_p": -1.0}, ValueError, "top_p"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    model: Any, prompt: list[int], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with engine(model) as running:
        with pytest.raises(error, match=message):
            running.submit(prompt, **options)
        assert running.stats()["requests_waiting"] == 0


def test_models_that_cannot_be_served_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="does not generate"):
        Engine(AutoModel.from_config(LLAMA.build().config).eval(), tokenizer)
    with pytest.raises(ValueError, match="does not generate"):
        Engine(BERT.build(), tokenizer)
    with pytest.raises(ValueError, match="training mode"):
        Engine(LLAMA.build().train(), tokenizer)
    with pytest.raises(TypeError, match="fast tokenizer"):
        Engine(LLAMA.build(), object())
    with pytest.raises(ValueError, match="max_batch"):
        Engine(LLAMA.build(), tokenizer, max_batch=0)
    with pytest.raises(NotImplementedError, match="goes on from its state by one token only"):
        Engine(tiny_model("mamba", AutoModelForCausalLM, state_size=4), tokenizer)


def test_a_config_of_a_request_stands_for_that_of_the_model(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    with engine(model) as running:
        request = running.submit("alpha beta gamma", generation_config=config)
        request.result()
    assert len(request.answer) == 3
    assert config.max_new_tokens == 3


def test_pieces_end_at_borders() -> None:
    assert piece_ends(0, 20, [], 8) == [8, 16, 20]
    assert piece_ends(0, 20, [3, 6, 13], 8) == [3, 6, 13, 20]
    assert piece_ends(0, 20, [3, 6, 13], 12) == [3, 13, 20]
    assert piece_ends(5, 20, [3, 6, 13], 12) == [13, 20]
    assert piece_ends(20, 20, [3], 8) == []
    assert piece_ends(0, 6, [3, 6, 13], 8) == [3, 6]
