"""OpenAI-compatible HTTP over one engine: completions, chat, models, health, metrics.

The engine runs in a separate thread. Each call submits its requests and reads their outputs from a
queue on the event loop. A call is aborted when its client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvstore.config.renamed import refuse_headers
from kvstore.engine import api
from kvstore.engine.loop import collect
from kvstore.engine.meters import EngineMeters
from kvstore.engine.request import Output, QueueFull
from kvstore.engine.request import Request as EngineRequest
from kvstore.engine.thread import EngineDead, EngineThread, stats_of
from kvstore.engine.tokenizer import Tokenizer, byte_tokenizer
from kvstore.errors import ConfigError
from kvstore.telemetry.traffic import check_traffic_label

TRAFFIC_LABEL_HEADER = "x-kvstore-traffic-label"
"""Request header with the label of the caller's traffic, for metrics."""
CLIENT_GONE = 499
"""Status of a call whose client has disconnected. Only the log shows it."""


class ModelUnknown(ConfigError):
    """The named model is neither the engine's nor one of its adapters."""


def traffic_label_of(http: Request) -> str:
    """Return the traffic label of a request. Raises ConfigError for an invalid label."""
    refuse_headers(http.headers)
    return check_traffic_label(http.headers.get(TRAFFIC_LABEL_HEADER, ""))


def add_log_fields(http: Request, **about: Any) -> None:
    """Add fields to the log line of a call, if the call is logged."""
    line = http.scope.get("state", {}).get("log")
    if line is not None:
        line.update(about)


def log_outputs(http: Request, outputs: Sequence[Output]) -> None:
    """Add the figures of a call's complete outputs to its log line."""
    add_log_fields(
        http,
        prompt_tokens=sum(output.prompt_tokens for output in outputs),
        cached_tokens=sum(sum(output.cached.values()) for output in outputs),
        output_tokens=sum(len(output.tokens) for output in outputs),
        ttft_ms=round(max((output.times.ttft_ms for output in outputs), default=0.0), 3),
    )


class Calls:
    """State shared by the endpoints: the thread, the model's name, the metrics."""

    def __init__(self, thread: EngineThread, model_name: str) -> None:
        self.thread = thread
        self.model_name = model_name
        self.tokenizer: Tokenizer = thread.engine.loaded.tokenizer
        self.meters = EngineMeters()
        self.started_s = int(time.time())

    def lora_of(self, model: str) -> str:
        """Return the adapter that a model name selects. "": the model itself."""
        loras = self.thread.engine.runner.loras
        if model == self.model_name:
            return ""
        if model in loras:
            return model
        known = ", ".join([self.model_name, *sorted(loras)])
        raise ModelUnknown(f"unknown model {model!r}; use one of {known}")

    def completion_requests(self, body: api.CompletionBody, name: str) -> list[EngineRequest]:
        """Return the requests of a completions call. Raises ConfigError if one is invalid."""
        body.check_supported()
        lora = self.lora_of(body.model)
        tokens = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        return self._requests(body, name, tokens, body.max_tokens, lora)

    def chat_requests(self, body: api.ChatBody, name: str) -> list[EngineRequest]:
        """Return the request of a chat call."""
        body.check_supported()
        lora = self.lora_of(body.model)
        if not body.messages:
            raise ConfigError("messages must have at least one message (got none)")
        messages = [message.plain() for message in body.messages]
        if self.tokenizer.facts.chat_template is None:
            tokens = self.tokenizer.encode(api.plain_chat(messages))
        else:
            tokens = self.tokenizer.encode(self.tokenizer.chat(messages), special=False)
        return self._requests(body, name, [tokens], body.limit, lora)

    def _requests(
        self,
        body: api.Body,
        name: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        lora: str,
    ) -> list[EngineRequest]:
        fields = body.request_fields()
        requests = [
            EngineRequest(
                request_id=f"{name}-{index}",
                prompt_tokens=tokens,
                max_tokens=max_tokens,
                lora_name=lora,
                **fields,
            )
            for index, tokens in enumerate(prompts)
        ]
        for request in requests:
            self.thread.engine.check_request(request)
        return requests

    async def outputs(
        self, requests: Sequence[EngineRequest], label: str
    ) -> AsyncGenerator[Output, None]:
        """Submit requests and yield their outputs. Aborts unfinished requests at the end."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Output] = asyncio.Queue()
        live: set[str] = set()

        def deliver(output: Output) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, output)
            except RuntimeError:  # The event loop is closed: there is no reader.
                self.thread.abort(output.request_id)

        try:
            for request in requests:
                self.thread.submit(request, deliver)
                live.add(request.request_id)
            while live:
                output = await arrived.get()
                if output.finish_reason is not None:
                    live.discard(output.request_id)
                if output.finish_reason == "error":
                    raise EngineDead(output.error)
                self.meters.observe(output, label)
                yield output
        finally:
            for request_id in live:
                self.thread.abort(request_id)
                self.meters.forget(request_id)

    async def collect_outputs(self, requests: Sequence[EngineRequest], label: str) -> list[Output]:
        """Return one complete output per request, in order."""
        async with aclosing(self.outputs(requests, label)) as outputs:
            seen = [output async for output in outputs]
        return collect(seen, [request.request_id for request in requests])


class ResponseShape:
    """Response format of one endpoint."""

    object = "text_completion"
    part_object = "text_completion"

    def __init__(self, requests: Sequence[EngineRequest], name: str, model: str) -> None:
        self.index = {request.request_id: index for index, request in enumerate(requests)}
        self.head = {"id": name, "created": int(time.time()), "model": model}

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return {
            **self.head,
            "object": self.object,
            "choices": [self.choice(output) for output in outputs],
            "usage": api.usage_of(outputs),
        }

    def part(self, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        """Return one event of a stream."""
        part: dict[str, Any] = {**self.head, "object": self.part_object, "choices": choices}
        if usage is not None:
            part["usage"] = usage
        return part

    def opening(self) -> list[dict[str, Any]]:
        """Return the choices of a stream's first event. Empty: no such event."""
        return []

    def choice(self, output: Output) -> dict[str, Any]:
        return {
            "index": self.index[output.request_id],
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }

    def step_choice(self, output: Output) -> dict[str, Any]:
        """Return the part of a stream for one output."""
        return self.choice(output)


class ChatResponseShape(ResponseShape):
    object = "chat.completion"
    part_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, output: Output) -> dict[str, Any]:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }

    def step_choice(self, output: Output) -> dict[str, Any]:
        return {
            "index": 0,
            "delta": {"content": output.text},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }


async def _events(
    calls: Calls,
    http: Request,
    requests: Sequence[EngineRequest],
    shape: ResponseShape,
    *,
    label: str,
    usage: bool,
) -> AsyncIterator[str]:
    """Yield server-sent events: one per step and request, then usage if requested."""
    seen: list[Output] = []
    try:
        if choices := shape.opening():
            yield _event(shape.part(choices))
        async with aclosing(calls.outputs(requests, label)) as outputs:
            async for output in outputs:
                seen.append(output)
                yield _event(shape.part([shape.step_choice(output)]))
        whole = collect(seen, list(shape.index))
        log_outputs(http, whole)
        if usage:
            yield _event(shape.part([], api.usage_of(whole)))
    except (EngineDead, QueueFull, ConfigError) as error:
        yield _event(api.error_body(str(error), 503))
    yield "data: [DONE]\n\n"


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, separators=(',', ':'))}\n\n"


async def _respond(
    calls: Calls,
    http: Request,
    body: api.Body,
    requests: Sequence[EngineRequest],
    shape: ResponseShape,
) -> Response:
    """Answer a call, streamed or complete. Stops when the client disconnects."""
    label = traffic_label_of(http)
    add_log_fields(http, completion_id=shape.head["id"], traffic_label=label)
    if body.stream:
        events = _events(calls, http, requests, shape, label=label, usage=body.wants_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    work = asyncio.create_task(calls.collect_outputs(requests, label))
    gone = asyncio.create_task(_until_gone(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=CLIENT_GONE)
        log_outputs(http, work.result())
        return JSONResponse(shape.body(work.result()))
    finally:
        for task in (work, gone):
            task.cancel()


async def _until_gone(http: Request) -> None:
    """Return when the client disconnects. The body has been read before."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def create_app(thread: EngineThread, *, model_name: str) -> FastAPI:
    """Return the app. It starts and stops the thread.

    A model without a tokenizer gets one that reads and writes bytes.
    """
    loaded = thread.engine.loaded
    if loaded.tokenizer is None:
        loaded.tokenizer = byte_tokenizer()
    calls = Calls(thread, model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        await run_in_threadpool(thread.stop)

    app = FastAPI(title="kvstore engine", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_generation(app, calls)
    _add_service(app, calls)
    _add_errors(app)
    return app


def _add_generation(app: FastAPI, calls: Calls) -> None:
    @app.post("/v1/completions")
    async def completions(body: api.CompletionBody, http: Request) -> Response:
        name = f"cmpl-{uuid.uuid4().hex}"
        requests = await run_in_threadpool(calls.completion_requests, body, name)
        shape = ResponseShape(requests, name, body.model)
        return await _respond(calls, http, body, requests, shape)

    @app.post("/v1/chat/completions")
    async def chat(body: api.ChatBody, http: Request) -> Response:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        requests = await run_in_threadpool(calls.chat_requests, body, name)
        shape = ChatResponseShape(requests, name, body.model)
        return await _respond(calls, http, body, requests, shape)


def _add_service(app: FastAPI, calls: Calls) -> None:
    thread = calls.thread

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        common = {"object": "model", "created": calls.started_s, "owned_by": "kvstore"}
        context = thread.engine.limits.max_context
        base = {"id": calls.model_name, **common, "max_model_len": context, "parent": None}
        loras = [
            {"id": name, **common, "max_model_len": context, "parent": calls.model_name}
            for name in sorted(thread.engine.runner.loras)
        ]
        return {"object": "list", "data": [base, *loras]}

    @app.get("/health")
    async def health() -> Response:
        if thread.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "dead", "error": thread.error}, status_code=503)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return await run_in_threadpool(stats_of, thread)

    @app.get("/metrics")
    async def metrics() -> Response:
        numbers = await run_in_threadpool(stats_of, thread)
        return Response(calls.meters.text(numbers), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        done = await run_in_threadpool(thread.call, lambda engine: engine.reset_prefix_cache())
        if done:
            return JSONResponse({"reset": True})
        message = "the prefix cache cannot be reset while requests run; try again later"
        return JSONResponse(api.error_body(message, 409), status_code=409)


def _add_errors(app: FastAPI) -> None:
    known = sorted({*api.CompletionBody.model_fields, *api.ChatBody.model_fields})

    def answer(message: str, status: int, code: str | None = None) -> JSONResponse:
        return JSONResponse(api.error_body(message, status, code=code), status_code=status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_http: Request, error: RequestValidationError) -> JSONResponse:
        return answer(api.validation_message(error, known), 400)

    @app.exception_handler(ConfigError)
    async def rejected(_http: Request, error: ConfigError) -> JSONResponse:
        if isinstance(error, ModelUnknown):
            return answer(str(error), 404, "model_not_found")
        return answer(str(error), 400)

    @app.exception_handler(QueueFull)
    async def full(_http: Request, error: QueueFull) -> JSONResponse:
        return answer(str(error), 429)

    @app.exception_handler(EngineDead)
    async def dead(_http: Request, error: EngineDead) -> JSONResponse:
        return answer(str(error), 503)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0: any free port.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(1024)
    except (OSError, OverflowError) as error:
        server.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; use another --host or --port"
        ) from error
    return server


def serve(
    app: FastAPI, listening: socket.socket, announce: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM, then return. Main thread only.

    announce: called when the server accepts calls and handles the signals.
    """
    config = uvicorn.Config(
        app, access_log=False, log_config=None, log_level="warning", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn handles both signals while it serves, and raises them again after its shutdown, for
    # the caller's own cleanup. A signal that arrives before it serves must not be lost.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    announce()
    server.run(sockets=[listening])
