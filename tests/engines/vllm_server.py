"""A scripted `vllm serve`: the endpoints that an engine calls, in vLLM's schemas, with faults on demand.

It generates token `(sum of the sequence) % vocabulary`, with a logprob of -0.5 each. Weights arrive over
`tests/engines/sockets.py` instead of NCCL, in the same chunks as vLLM's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.engines import sockets

VOCABULARY = 96
POLL = 0.005


@dataclass
class Script:
    """The server's settings, the calls it received, and the faults it injects."""

    version: str = "0.32.0"
    logprobs_mode: str = "processed_logprobs"
    weight_transfer: Any = field(default_factory=lambda: {"backend": "nccl"})
    load_format: str = "auto"
    quantization: str | None = None
    dtype: str = "torch.float32"
    max_model_len: int = 96
    can_sleep: bool = False
    policy: str = "fcfs"
    key: str = ""
    label: str = "default"
    paused: bool = False
    packages: str = ""
    fail: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """By path: a status and a body to answer with, once."""
    hang: set[str] = field(default_factory=set)
    """Paths that are never answered."""
    event: Any = None
    """Sent instead of an event with a token."""
    hold_after: int = 10**6
    """Tokens after which a completion waits until this is changed."""
    calls: list[str] = field(default_factory=list)
    """Calls that change the server, in order."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of completion requests."""
    open: int = 0
    """Completions in progress."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Received tensors."""
    init: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    stop: Any = None

    def settings(self) -> dict[str, Any]:
        return {
            "vllm_config": {
                "model_config": {
                    "dtype": self.dtype,
                    "max_model_len": self.max_model_len,
                    "logprobs_mode": self.logprobs_mode,
                    "enable_sleep_mode": self.can_sleep,
                    "quantization": self.quantization,
                },
                "cache_config": {"block_size": 16, "num_gpu_blocks": 100, "kv_cache_memory_bytes": 4096},
                "scheduler_config": {"policy": self.policy},
                "load_config": {"load_format": self.load_format},
                "weight_transfer_config": self.weight_transfer,
            },
            "system_env": {"pip_packages": self.packages},
        }


@contextlib.contextmanager
def serving(script: Script, **tls: Any) -> Iterator[Script]:
    """`tls` are uvicorn's options `ssl_certfile` and `ssl_keyfile`."""
    config = uvicorn.Config(_application(script), host="127.0.0.1", port=0, log_level="error", lifespan="off", **tls)
    server = uvicorn.Server(config)
    dead = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.002)
    port = server.servers[0].sockets[0].getsockname()[1]
    script.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    def die() -> None:
        """Like a killed process: break connections, answer nothing."""
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for listening in server.servers:
            listening.close()
        server.force_exit = server.should_exit = True
        dead.set()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended before
            loops[0].call_soon_threadsafe(die)
            dead.wait(20)

    script.stop = stop
    try:
        yield script
    finally:
        stop()


def _application(script: Script) -> Starlette:
    worker = _Worker(script)

    def control(path: str, name: str, work: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            body = json.loads(await request.body() or b"{}")
            script.calls.append(name)
            if problem := await _problem(script, request):
                return problem
            return JSONResponse(await asyncio.to_thread(work, request, body))

        return Route(path, endpoint, methods=["POST"])

    def look(path: str, answer: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            if problem := await _problem(script, request):
                return problem
            found = answer()
            return Response() if found is None else JSONResponse(found)

        return Route(path, endpoint)

    def put(**values: Any) -> Any:
        def work(request: Request, body: Any) -> Any:
            for name, value in values.items():
                setattr(script, name, value)
            return {"status": "done"}

        return work

    def relabel(request: Request, body: Any) -> Any:
        script.label = body["new_version"]
        return {"success": True, "new_version": script.label}

    return Starlette(
        routes=[
            look("/health", lambda: None),
            look("/version", lambda: {"version": script.version}),
            look("/v1/models", lambda: {"data": [{"id": "policy", "max_model_len": script.max_model_len}]}),
            look("/server_info", script.settings),
            look("/is_paused", lambda: {"is_paused": script.paused}),
            look("/weight_info", lambda: {"weight_version": script.label}),
            look("/get_world_size", lambda: {"world_size": 1}),
            control("/pause", "pause", put(paused=True)),
            control("/resume", "resume", put(paused=False)),
            control("/sleep", "sleep", put(paused=True)),
            control("/wake_up", "wake", put(paused=False)),
            control("/reset_prefix_cache", "reset", lambda request, body: {"success": True}),
            control("/update_weight_version", "label", relabel),
            control("/init_weight_transfer_engine", "init", worker.init),
            control("/start_weight_update", "start", lambda request, body: {"message": "Weight update started"}),
            control("/update_weights", "update", worker.update),
            control("/finish_weight_update", "finish", worker.finish),
            Route("/v1/completions", _completions(script), methods=["POST"]),
        ],
        exception_handlers={Exception: _said},
    )


async def _said(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "type": "InternalServerError", "code": 500}}, 500)


async def _problem(script: Script, request: Request) -> Response | None:
    path = request.url.path
    if script.key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {script.key}":
        return JSONResponse({"error": "Unauthorized"}, 401)
    while path in script.hang:
        await asyncio.sleep(POLL)
    if path in script.fail:
        status, body = script.fail.pop(path)
        return JSONResponse(body, status) if not isinstance(body, str) else Response(body, status)
    return None


class _Worker:
    def __init__(self, script: Script) -> None:
        self._script, self._peer = script, None

    def init(self, request: Request, body: Any) -> Any:
        self._script.init = body["init_info"]
        self._peer = sockets.dial(base64.b64decode(self._script.init["nccl_unique_id_b64"]))
        return {"message": "Weight transfer initialized"}

    def update(self, request: Request, body: Any) -> Any:
        """Split the stream into chunks as vLLM does."""
        info, script = body["update_info"], self._script
        chunk: list[tuple[str, Any, list[int], int]] = []
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            kind = np.dtype(dtype)
            chunk.append((name, kind, shape, math.prod(shape) * kind.itemsize))
            if sum(size for *_, size in chunk) > script.init["packed_buffer_size_bytes"]:
                self._take(chunk)
                chunk = []
        if chunk:
            self._take(chunk)
        return {"message": "Weights updated"}

    def _take(self, chunk: list[tuple[str, Any, list[int], int]]) -> None:
        data, start = sockets.receive(self._peer, sum(size for *_, size in chunk)), 0
        for name, kind, shape, size in chunk:
            self._script.tensors[name] = np.frombuffer(data[start : start + size], kind).reshape(shape)
            start += size

    def finish(self, request: Request, body: Any) -> Any:
        self._script.label = body.get("weight_version") or self._script.label
        return {"message": "Weight update finished"}


def _completions(script: Script) -> Any:
    async def endpoint(request: Request) -> Response:
        if problem := await _problem(script, request):
            return problem
        body = await request.json()
        script.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(_events(script, request, body), media_type="text/event-stream")
        rows: list[Any] = [None]
        for token in body["prompt"][1:]:
            others = {str(t): {"logprob": -0.1 * (t + 1)} for t in range(body["prompt_logprobs"])}
            rows.append(others | {str(token): {"logprob": -0.25}})
        return JSONResponse({"choices": [{"prompt_logprobs": rows}]})

    return endpoint


async def _events(script: Script, request: Request, body: Any) -> AsyncGenerator[str, None]:
    tokens, count = list(body["prompt"]), 0
    script.open += 1
    try:
        while True:
            while script.paused or count >= script.hold_after:
                await asyncio.sleep(POLL)
            tokens.append(sum(tokens) % VOCABULARY)
            count += 1
            stops = tokens[-1] in body["stop_token_ids"] and count > body["min_tokens"]
            reason = "stop" if stops else "length" if count == body["max_tokens"] else None
            row = {f"token_id:{tokens[-1]}": -0.5} | {f"token_id:{90 + i}": -1.0 - i for i in range(body["logprobs"])}
            columns = {"token_logprobs": [-0.5], "top_logprobs": [row]}
            event = {"choices": [{"token_ids": tokens[-1:], "logprobs": columns, "finish_reason": reason}]}
            yield f"data: {json.dumps(event if script.event is None else script.event)}\n\n"
            if reason:
                yield "data: [DONE]\n\n"
                return
    finally:
        script.open -= 1
