"""An OpenAI-compatible server: Transformers' own application and handlers, with our engine behind them.

Transformers loads models by the names that requests give, from the Hub or from the disk. Here one model is loaded when
the server starts, and requests can neither load nor unload one: what they name reaches no file.
"""

import asyncio
import hmac
import inspect
import json
import logging
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints import load_checkpoint, read_tokenizer
from ..utils.extras import require_packages
from .engine import Engine, QueueFullError
from .options import ServeConfig
from .requests import Request

require_packages("fastapi", "uvicorn", "openai", extra="serve", purpose="The server")

import uvicorn  # noqa: E402
from fastapi import FastAPI, HTTPException  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.responses import JSONResponse, PlainTextResponse  # noqa: E402
from starlette.types import Message, Receive, Scope, Send  # noqa: E402
from transformers.cli.serving.chat_completion import ChatCompletionHandler  # noqa: E402
from transformers.cli.serving.completion import CompletionHandler  # noqa: E402
from transformers.cli.serving.model_manager import ModelManager  # noqa: E402
from transformers.cli.serving.response import ResponseHandler  # noqa: E402
from transformers.cli.serving.server import build_server  # noqa: E402
from transformers.cli.serving.utils import (  # noqa: E402
    X_REQUEST_ID,
    BaseGenerateManager,
    BaseHandler,
    GenerationState,
    Modality,
    _StreamError,
    response_events_to_chunks,
)

logger = logging.getLogger(__name__)

#: What is served. Transformers' other routes load, unload or need other models.
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/metrics")

#: The longest body of a request in bytes.
MAX_BODY = 16 << 20

#: Values of fields that Transformers' handlers ignore, which then change nothing. Fields that only describe a request
#: have any value.
NEUTRAL: dict[str, Any] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "truncation": ("disabled",),
    "background": (False,),
    "modalities": (["text"],),
}
DESCRIPTIVE = ("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "include")

#: Attribute of a generation config that is a request's. (Transformers has no such field, and sets the seed of all.)
SEED = "_seed"

#: Seconds after which a client may try again when the queue is full.
RETRY_AFTER = 5

#: Seconds that running answers have after SIGTERM.
DRAIN_SECONDS = 600


class OneModel(ModelManager):
    """Transformers' manager of models, with one that is loaded already."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._model

    @staticmethod
    def get_model_modality(*args: Any, **kwargs: Any) -> Modality:
        return Modality.LLM

    def list_models(self, *args: Any) -> list[dict[str, Any]]:
        return [{"id": self._name, "object": "model", "created": 0, "owned_by": "local"}]

    get_gen_models = list_models  # the name in Transformers 5.23


class TextStream:
    """What Transformers' handlers read: a queue of text and parsed tool calls, `total_tokens` and `cancel`."""

    def __init__(self, parser: Any) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.request: Request | None = None
        self._loop, self._parser = asyncio.get_running_loop(), parser
        if parser is not None:
            self._put(response_events_to_chunks(parser.initial_events))

    @property
    def total_tokens(self) -> int:
        return 0 if self.request is None else len(self.request.answer)

    def cancel(self) -> None:
        if self.request is not None:
            self.request.cancel()

    def listen(self, event: str | BaseException | None) -> None:
        """Take an event of the engine's thread to the loop; one that was closed meanwhile needs none."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: str | BaseException | None) -> None:
        if isinstance(event, BaseException):
            # The handlers write the message into JSON as it is.
            self.queue.put_nowait(_StreamError(json.dumps(str(event))[1:-1]))
        elif event is None:
            self._put([None] if self._parser is None else [*self._parsed_end(), None])
        elif self._parser is None:
            self._put([event])
        else:
            self._put(response_events_to_chunks(self._parser.feed(event)))

    def _parsed_end(self) -> list[Any]:
        try:
            return response_events_to_chunks(self._parser.finalize()[1])
        except (ValueError, RuntimeError) as error:  # the answer ends inside of a tool call
            logger.warning("The end of an answer cannot be parsed: %s", error)
            return []

    def _put(self, items: list[Any]) -> None:
        for item in items:
            self.queue.put_nowait(item)


class EngineManager(BaseGenerateManager):
    """Hands what Transformers' handlers have prepared to the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        #: The requests whose clients wait, by the id that the gate has given them; None until the engine has them.
        self.running: dict[str, Request | None] = {}

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        stream = TextStream(response_parser)
        stream.request = self._submit(inputs, gen_config, request_id, stream.listen, response_parser is None)
        return stream.queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        stream = TextStream(None)
        request = self._submit(inputs, gen_config, request_id, stream.listen, True)
        while (item := await stream.queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise RuntimeError(f"The request failed: {item.msg}")
        return request.text, len(request.prompt), request.answer

    def _submit(self, inputs: Any, config: Any, request_id: str, listener: Any, skip_special: bool) -> Request:
        request = self.engine.submit(
            inputs["input_ids"][0].tolist(),
            generation_config=config,
            seed=getattr(config, SEED, None),
            listener=listener,
            skip_special_tokens=skip_special,
        )
        config.max_new_tokens = request.max_new_tokens  # by which the handlers say why an answer ended
        if request_id in self.running:
            self.running[request_id] = request
        else:
            request.cancel()
        return request

    def forget(self, request_id: str) -> None:
        """Forget a request, whose client has its answer or has left."""
        request = self.running.pop(request_id, None)
        if request is not None:
            request.cancel()

    def stop(self) -> None:
        self.engine.close(wait=False)


class EngineState(GenerationState):
    """Transformers' registry of managers: ours, for the one model that there is."""

    def __init__(self, manager: EngineManager) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self._manager

    def is_cb_alive(self) -> bool:
        return self._manager.engine.is_alive()


class StrictRequests(BaseHandler):
    """Refuses what Transformers' handlers would ignore or fail at, and bounds the answer."""

    max_new_tokens: int

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except QueueFullError as error:
            raise HTTPException(429, str(error), {"Retry-After": str(RETRY_AFTER)}) from error
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise HTTPException(400, f"{type(error).__name__}: {error}") from error

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        for name in self._unused_fields & body.keys() - {*DESCRIPTIVE}:
            value = body[name]
            if value is not None and value not in NEUTRAL.get(name, ()):
                raise ValueError(f"{name}={value!r} is not served. Leave it out.")
        template_options = body.get("chat_template_kwargs") or {}
        reserved = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        if not isinstance(template_options, dict) or template_options.keys() & reserved.keys():
            raise ValueError("chat_template_kwargs must be a mapping of variables of the chat template.")

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seed = body.pop("seed", None)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise ValueError(f"seed must be a whole number from 0 on, got {seed!r}.")
        config = super()._build_generation_config(body, *args, **kwargs)
        setattr(config, SEED, seed)
        if body.get("temperature"):
            config.do_sample = True
        requested = self.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens
        config.max_new_tokens = min(requested, self.max_new_tokens)
        return config


class ChatHandler(StrictRequests, ChatCompletionHandler):
    """Chats."""


class TextHandler(StrictRequests, CompletionHandler):
    """Completions of a text."""


class AnswerHandler(StrictRequests, ResponseHandler):
    """The newer interface of chats."""


class Gate:
    """The outermost layer of the application: who may come in, what is measured, and what happens when a client leaves.

    Each request gets an id of ours, so that no client can name that of another.
    """

    def __init__(self, app: FastAPI, manager: EngineManager, api_key: str | None) -> None:
        self.app, self.manager = app, manager
        self.credentials = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = b""
        refusal = self._refusal(scope)
        while refusal is None:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                refusal = _error(413, f"The request is longer than {MAX_BODY} bytes.")
            if not message.get("more_body"):
                break
        if refusal is None and scope["path"] == "/metrics":
            refusal = PlainTextResponse(metrics(self.manager.engine), media_type="text/plain; version=0.0.4")
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._pass(scope, body, receive, send)

    async def _pass(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application, and free the row of a client that leaves meanwhile."""
        request_id = str(uuid.uuid4())
        headers = [(name, value) for name, value in scope["headers"] if name != X_REQUEST_ID.encode()]
        scope = {**scope, "headers": [*headers, (X_REQUEST_ID.encode(), request_id.encode())]}
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def notice_leaving() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.manager.forget(request_id)
            left.set()

        async def next_message() -> Message:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        self.manager.running[request_id] = None
        watcher = asyncio.create_task(notice_leaving())
        try:
            await self.app(scope, next_message, send)
        finally:
            watcher.cancel()
            self.manager.forget(request_id)

    def _refusal(self, scope: Scope) -> Any:
        """Return the response to a request that may not come in; None where it may."""
        path = scope["path"]
        if path not in ROUTES:
            return _error(404, f"There is no {path}. Served are {', '.join(ROUTES)}.")
        is_open = path == "/health" or scope["method"] == "OPTIONS"
        if self.credentials is None or is_open:
            return None
        credentials = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(credentials, self.credentials):
            return _error(401, "This server needs an API key.")
        return None


def _error(status: int, message: str, headers: Any = None) -> JSONResponse:
    """Return an error in the form that OpenAI's clients show."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status, headers=headers)


async def _refused(request: Any, error: Any) -> JSONResponse:
    return _error(error.status_code, str(error.detail), error.headers)


async def _invalid(request: Any, error: Any) -> JSONResponse:
    return _error(422, f"The body is no JSON object: {error}")


def metrics(engine: Engine) -> str:
    """Return counters and sizes in Prometheus' text format."""
    lines = []
    for name, value in engine.stats().items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE hla_{name} {kind}", f"hla_{name} {value}"]
    return "\n".join([*lines, ""])


def build_app(engine: Engine, name: str, config: ServeConfig) -> Gate:
    """Return the ASGI application that serves an engine under the name of its model."""
    manager = EngineManager(engine)
    models = OneModel(name, engine.model, engine.tokenizer)
    state = EngineState(manager)
    chat = ChatHandler(models, state)
    text = TextHandler(models, state)
    answer = AnswerHandler(models, state)
    for handler in (chat, text, answer):
        handler.max_new_tokens = config.max_new_tokens
    closed: Any = None  # the handlers of routes that are not served
    app = build_server(models, chat, text, answer, closed, closed, state, config.cors)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    return Gate(app, manager, config.api_key)


def serve(config: ServeConfig) -> None:
    """Serve a checkpoint until SIGTERM or Ctrl-C; then take no new requests, end the running ones, and return.

    Raises:
        OSError: The model cannot be loaded, or the port is taken.
        ValueError, TypeError, NotImplementedError: See `Engine`.
    """
    tokenizer = read_tokenizer(config.model)
    model, _ = load_checkpoint(config.model, AutoModelForCausalLM, dtype=config.dtype)
    model = model.eval().to(config.device)
    name = Path(config.model).name
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise OSError(
                f"Cannot listen at {config.host}:{config.port} ({error.strerror or error}). Choose another --port."
            ) from error
        engine = Engine(
            model,
            tokenizer,
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            max_length=config.max_length,
            prefix_cache_mb=config.prefix_cache_mb,
            prefix_dir=config.prefix_dir,
        )
        with engine:
            listener.listen()
            host, port = listener.getsockname()[:2]
            log = uvicorn.config.LOGGING_CONFIG
            log["loggers"]["hf_linear_attn"] = {"handlers": ["default"], "level": "INFO"}
            log["loggers"]["transformers.cli"] = {"handlers": ["default"], "level": "ERROR", "propagate": False}
            app: Any = build_app(engine, name, config)
            settings = uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=DRAIN_SECONDS, log_config=log)
            # Once it has ended on SIGTERM, uvicorn raises the signal again.
            signal.signal(signal.SIGTERM, lambda *_: None)
            sys.stdout.write(f"Serving {name} at http://{host}:{port}/v1\n")
            sys.stdout.flush()
            uvicorn.Server(settings).run(sockets=[listener])
