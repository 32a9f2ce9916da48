"""A stand-in for an SGLang server, in its own process, with the schemas of SGLang 0.5.18. It follows SGLang's source
(`http_server.py`, `io_struct.py`, `scheduler.py`, `sampler.py`, `weight_updater.py`) where it matters:

    requests wait, run and are retracted; aborting a running one takes a step; a closed connection is noticed two seconds late
    the prefix cache is keyed by `extra_key` and ignores changes of the weights; here it caches logits
    an update with `flush_cache`, or a release of memory, ends the process if it holds a request, like SGLang's assertion
    workers join a torch process group, and load buckets of bytes

Tokens and logprobs are those of a real model, from our decoder. Fields that SGLang does not have are refused. `/_test` is for
tests: faults, settings, and the calls received.

    python -m tests.engines.sglang_server MODEL PORT_FILE"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.model.tree import flatten, unflatten

CONTEXT = 128
REQUEST = {
    *(
        "rid",
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "stream",
    ),
    *("return_sampling_mask", "priority", "extra_key", "cache_salt", "return_text_in_logprobs", "token_ids_logprob"),
}
SETTINGS: dict[str, Any] = {
    "version": "0.5.18",
    "dtype": "float32",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "page_size": 1,
    "max_total_num_tokens": 4096,
    "max_req_input_len": CONTEXT - 1 - 5,
    "quantization": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "load_format": "auto",
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
    "enable_deterministic_inference": True,
    "incremental_streaming_output": True,
    "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False,
    "internal_states": [{"memory_usage": {"weight": 0.1, "kvcache": 0.25, "token_capacity": 4096}}],
}

_logits = jax.jit(decoder.forward, static_argnums=1)


@dataclass(kw_only=True)
class Sampling:
    """A request, with the fields of SGLang's class."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Any = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream_interval: int = 1
    logit_bias: Any = None
    sampling_seed: int = 42

    def __post_init__(self) -> None:
        for name, low, high in (("frequency", -2, 2), ("presence", -2, 2), ("repetition", 0, 2)):
            if not low <= (value := getattr(self, f"{name}_penalty")) <= high:
                raise ValueError(f"{name}_penalty must be in [{low}, {high}], got {value}.")
        if not self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({self.max_new_tokens})]")
        if self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1


@dataclass(eq=False)
class Req:
    rid: str
    prompt: list[int]
    sampling: Sampling
    key: str | None
    body: dict[str, Any]
    outputs: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    tops: list[list[Any]] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    told: int = 0
    aborted: bool = False


class Server:
    def __init__(self, directory: Path) -> None:
        self.model = read_config(directory)
        self._original = flatten(hf_weights.load(directory, self.model))
        self.test = _Test()
        self.reset()

    def reset(self) -> None:
        self.params = dict(self._original)
        self.settings, self.label, self.model_path = dict(SETTINGS), "default", "model"
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.cache: dict[tuple[str | None, tuple[int, ...]], np.ndarray] = {}
        self.paused = self.tokenizer_paused = False
        self.released: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.busy = asyncio.Lock()
        """The scheduler is serial: a call that blocks it blocks generation."""

    # --- the scheduler ---

    async def steps(self) -> None:
        while True:
            await asyncio.sleep(0 if self.running and not self.paused else 0.001)
            if self.paused or self.busy.locked():
                continue
            self.running += self.waiting[: 8 - len(self.running)]
            self.waiting = [req for req in self.waiting if req not in self.running]
            for req in list(self.running):
                if req.aborted:
                    self._finish(req, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
                elif len(req.tokens) < self.test.hold_after:
                    self._step(req)
                await asyncio.sleep(0)
                if self.paused or self.busy.locked():
                    break

    def _step(self, req: Req) -> None:
        if self.released:
            die("a step, and the memory is not there")
        sampling = req.sampling
        if sampling.max_new_tokens == 0:
            self._finish(req, {"type": "length", "length": 0})
            return
        logits = edited(self.logits(req.key, (*req.prompt, *req.tokens)), req, self.model)
        scaled = log_softmax(logits / sampling.temperature)
        position = len(req.prompt) + len(req.tokens)
        seed = sampling.sampling_seed if self.settings["enable_deterministic_inference"] else None
        if sampling.min_p and seed is not None and sampling.top_k != 1:
            die("With sampling seed, multinomial_with_seed will provide wrong results")
        token, kept = draw(np.exp(scaled), sampling, seed, position)
        told = log_softmax(logits) if self.test.original_logprobs else scaled
        req.tokens.append(token)
        req.rows.append([float(told[token]), token, None])
        req.tops.append(likeliest(told, req.body.get("top_logprobs_num", 0)))
        req.kept.append(float(scaled[token] - np.log(np.exp(scaled)[kept].sum())))
        ends = {*(sampling.stop_token_ids or ()), *self.model.eos_token_ids}
        if not sampling.ignore_eos and token in ends:
            self._finish(req, {"type": "stop", "matched": token})
        elif len(req.tokens) == sampling.max_new_tokens:
            self._finish(req, {"type": "length", "length": len(req.tokens)})
        elif sampling.stream_interval <= 1 or len(req.tokens) % sampling.stream_interval == 1:
            self._tell(req, None)

    def logits(self, key: str | None, tokens: tuple[int, ...]) -> np.ndarray:
        """Logits of the next token, from the cache if possible."""
        if (key, tokens) not in self.cache:
            padded = np.zeros((1, CONTEXT), np.int32)
            padded[0, : len(tokens)] = tokens
            self.cache[key, tokens] = np.asarray(_logits(unflatten(self.params), self.model, padded))[
                0, len(tokens) - 1
            ]
        return self.cache[key, tokens]

    def _finish(self, req: Req, reason: dict[str, Any]) -> None:
        if req in self.running:
            self.running.remove(req)
        self._tell(req, reason)

    def _tell(self, req: Req, reason: dict[str, Any] | None) -> None:
        start, stream = req.told, req.body.get("stream", False)
        req.told = len(req.tokens)
        if not stream and reason is None:
            return
        start = start if stream else 0
        meta: dict[str, Any] = {
            **{"id": req.rid, "finish_reason": reason, "prompt_tokens": len(req.prompt), "num_retractions": 0},
            **{"weight_version": self.label, "completion_tokens": len(req.tokens), "cached_tokens": 0},
        }
        if req.body.get("return_logprob"):
            meta |= {"input_token_logprobs": self._of_prompt(req, "rows"), "output_token_logprobs": req.rows[start:]}
            meta["output_token_logprobs_length"] = len(req.rows)
            if req.body.get("top_logprobs_num", 0):
                meta |= {"input_top_logprobs": self._of_prompt(req, "tops"), "output_top_logprobs": req.tops[start:]}
        if req.body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token] for token in req.tokens[start:]]
            meta["output_token_sampling_logprobs"] = req.kept[start:]
        answer = {"text": "", "output_ids": req.tokens[start:], "meta_info": meta}
        req.outputs.put_nowait(answer if self.test.event is None else self.test.event)

    def _of_prompt(self, req: Req, what: str) -> list[Any]:
        first = req.body.get("logprob_start_len", -1)
        if first < 0:
            return []
        found: list[Any] = [[None, req.prompt[0], None] if what == "rows" else None]
        for i in range(1, len(req.prompt)):
            row = log_softmax(self.logits(req.key, tuple(req.prompt[:i])))
            token = req.prompt[i]
            told = likeliest(row, req.body.get("top_logprobs_num", 0))
            found.append([float(row[token]), token, None] if what == "rows" else told)
        return found[first:]

    def abort(self, rid: str, everything: bool = False) -> None:
        for req in [r for r in self.waiting if everything or r.rid.startswith(rid)]:
            self.waiting.remove(req)
            self._finish(req, {"type": "abort", "message": "Abort in waiting queue"})
        for req in self.running:
            req.aborted |= everything or req.rid.startswith(rid)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def check_flush(self, body: dict[str, Any]) -> None:
        if body.get("flush_cache", True):
            if not self.is_idle:
                die("Cache flush failed after updating weights")
            self.cache.clear()

    # --- weights ---

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Like a model's loader: tensor by tensor, and an error leaves the rest unloaded."""
        for name, array in arrays.items():
            if name not in self.params:
                raise ValueError(f"{name} is not a parameter")
            if array.shape != self.params[name].shape:
                raise ValueError(f"{name}: {array.shape} is not {self.params[name].shape}")
            self.params[name] = jnp.asarray(array, jnp.float32)

    def from_disk(self, body: dict[str, Any]) -> Any:
        known(body, "model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache", "keep_pause")
        self.test.loaded = []
        try:
            for path in sorted(Path(body["model_path"]).glob("*.safetensors")) or [Path(body["model_path"]) / "none"]:
                arrays = load_file(path)
                self.test.loaded += list(arrays)
                self.load(arrays)
        except Exception as error:
            return False, f"Failed to update weights: {error}.\nRolling back to original weights.", 0
        self.check_flush(body)
        self.model_path = body["model_path"]
        self.label = body.get("weight_version") or self.label
        return True, "Succeeded to update model weights.", 0

    def init_group(self, body: dict[str, Any]) -> Any:
        known(body, "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        try:
            self.groups[body["group_name"]] = custom_process_group(
                backend=body["backend"],
                init_method=f"tcp://{body['master_address']}:{body['master_port']}",
                rank=body["rank_offset"],
                world_size=body["world_size"],
                group_name=body["group_name"],
            )
            return True, "Succeeded to initialize custom process group."
        except Exception as error:
            return False, f"Failed to initialize custom process group: {error}."

    def destroy_group(self, body: dict[str, Any]) -> Any:
        known(body, "group_name")
        import torch.distributed

        if body["group_name"] not in self.groups:
            return False, "The group to be destroyed does not exist."
        torch.distributed.destroy_process_group(self.groups.pop(body["group_name"]))
        return True, "Succeeded to destroy custom process group."

    def from_distributed(self, body: dict[str, Any]) -> Any:
        import torch
        import torch.distributed

        known(body, "names", "dtypes", "shapes", "group_name", "flush_cache", "load_format", "weight_version")
        if body["group_name"] not in self.groups:
            die(f"Group {body['group_name']} not in {list(self.groups)}")
        assert body["load_format"] == "flattened_bucket"
        shapes, kinds = body["shapes"], [getattr(torch, name) for name in body["dtypes"]]
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        try:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            torch.distributed.broadcast(flat, src=0, group=self.groups[body["group_name"]])
            start, arrays = 0, {}
            for name, shape, kind, size in zip(body["names"], shapes, kinds, sizes, strict=True):
                arrays[name] = flat[start : start + size].view(kind).reshape(shape).float().numpy()
                start += size
            self.load(arrays)
        except Exception as error:
            return False, f"Failed to update parameter online: {error}. Please discard the whole weights."
        self.test.loaded += body["names"]
        self.check_flush(body)
        self.label = body.get("weight_version") or self.label
        return True, "Succeeded to update parameter online."

    # --- memory ---

    def release(self, tags: list[str]) -> None:
        if not self.is_idle:
            die("release_memory_occupation should be called only when server is idle.")
        self.released |= set(tags)
        self.cache.clear()
        if "weights" in tags and not self.settings["enable_weights_cpu_backup"]:
            self.params = {name: jnp.full_like(leaf, jnp.nan) for name, leaf in self.params.items()}

    def resume(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self.released:
                die(f"KeyError: {tag}")
            self.released.remove(tag)


@dataclass
class _Test:
    """The faults a test injects, and the calls received."""

    fail: dict[str, Any] = field(default_factory=dict)
    """By path: [status, body] to answer with, once."""
    hang: list[str] = field(default_factory=list)
    hold_after: int = 10**6
    """Number of tokens after which requests wait."""
    original_logprobs: bool = False
    key: str = ""
    event: Any = None
    """Sent instead of drawn tokens."""
    calls: list[str] = field(default_factory=list)
    """Paths of control calls, in order."""
    bodies: list[Any] = field(default_factory=list)
    """Bodies of generate requests."""
    loaded: list[str] = field(default_factory=list)
    """Names of the tensors of the last update."""


# --- sampling ---


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def edited(logits: np.ndarray, req: Req, model: ModelConfig) -> np.ndarray:
    values, sampling = logits.astype(np.float64), req.sampling
    for token, bias in (sampling.logit_bias or {}).items():
        values[int(token)] += bias
    for token in set(req.tokens):  # and not of the prompt
        factor = sampling.repetition_penalty
        values[token] = values[token] * factor if values[token] < 0 else values[token] / factor
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * req.tokens.count(token)
    if len(req.tokens) < sampling.min_new_tokens:
        values[[*(sampling.stop_token_ids or ()), *model.eos_token_ids]] = -np.inf
    return values


def draw(probs: np.ndarray, sampling: Sampling, seed: int | None, position: int) -> tuple[int, np.ndarray]:
    """Return the token, and the set it was drawn from."""
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    keep = (np.cumsum(ranked) - ranked) <= sampling.top_p
    if sampling.top_k > 0:
        keep &= np.arange(len(probs)) < sampling.top_k
    keep &= ranked >= sampling.min_p * ranked[0]
    left = order[keep]
    bits = np.random.Philox(key=[seed, position]) if seed is not None else np.random.PCG64()
    noise = np.random.Generator(bits).gumbel(size=len(probs))
    with np.errstate(divide="ignore"):
        return int(left[(np.log(probs) + noise)[left].argmax()]), left


def likeliest(row: np.ndarray, count: int) -> list[Any]:
    return [[float(row[token]), int(token), None] for token in np.argsort(-row, kind="stable")[:count]]


# --- process groups ---


def custom_process_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str) -> Any:
    """SGLang's `init_custom_process_group`."""
    from torch.distributed import distributed_c10d as c10d

    store, rank, world_size = next(c10d.rendezvous(init_method, rank, world_size, timeout=c10d.default_pg_timeout))
    store.set_timeout(c10d.default_pg_timeout)
    group, _ = c10d._new_process_group_helper(
        *(world_size, rank, [], c10d.Backend(backend), c10d.PrefixStore(group_name, store)),
        group_name=group_name,  # type: ignore[arg-type]
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


# --- HTTP ---


def die(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def known(body: dict[str, Any], *names: str) -> None:
    if unknown := body.keys() - set(names):
        die(f"SGLang has no fields {unknown}")


def application(server: Server) -> Starlette:
    condition = asyncio.Condition()

    def route(path: str, work: Any, *methods: str) -> Route:
        async def endpoint(request: Request) -> Response:
            if problem := await _problem(server, request):
                return problem
            body = json.loads(await request.body() or b"{}")
            if path != "/generate" and request.method == "POST":
                server.test.calls.append(path)
            return await work(body, request)  # type: ignore[no-any-return]

        return Route(path, endpoint, methods=[*methods])

    async def info(body: Any, request: Request) -> Response:
        return JSONResponse({"model_path": server.model_path, **server.settings})

    async def model_info(body: Any, request: Request) -> Response:
        found = {"model_path": server.model_path, "is_generation": True, "weight_version": server.label}
        return JSONResponse(found | {"load_format": server.settings["load_format"]})

    async def generate(body: Any, request: Request) -> Response:
        server.test.bodies.append(body)
        try:
            known_request(body)
            sampling = Sampling(**body.get("sampling_params", {}))
            if len(body["input_ids"]) > CONTEXT - 2:
                raise ValueError("The input is longer than the model's context length")
        except (ValueError, TypeError) as error:
            said = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            if not body.get("stream"):
                return JSONResponse({"error": {"message": str(error)}}, 400)
            return StreamingResponse(_events([{"error": said}]), media_type="text/event-stream")
        limit = server.settings["max_req_input_len"] + 5 - len(body["input_ids"]) - 1
        sampling.max_new_tokens = max(0, min(sampling.max_new_tokens, limit))
        req = Req(body["rid"], body["input_ids"], sampling, body.get("extra_key"), body)

        async def outputs() -> AsyncGenerator[dict[str, Any], None]:
            async with condition:
                await condition.wait_for(lambda: not server.tokenizer_paused)
            if body.get("return_sampling_mask") and (sampling.top_k, sampling.top_p) == (-1, 1.0):
                server._finish(req, {"type": "abort", "message": "return_sampling_mask …", "status_code": 400})
            else:
                server.waiting.append(req)
            while True:
                answer = await req.outputs.get()
                yield answer
                if (answer.get("meta_info") or {}).get("finish_reason") is not None:
                    return

        if body.get("stream"):
            late = BackgroundTask(_abort_late, server, req.rid)
            return StreamingResponse(_stream(outputs()), media_type="text/event-stream", background=late)
        async with contextlib.aclosing(outputs()) as answers:
            return JSONResponse(await anext(answers))

    async def pause(body: Any, request: Request) -> Response:
        known(body, "mode")
        server.tokenizer_paused = True
        if body.get("mode", "abort") == "abort":
            server.abort("", everything=True)
            while not server.is_idle:
                await asyncio.sleep(0.01)
        else:
            server.paused = True
            if body["mode"] == "retract":
                server.waiting, server.running = server.running + server.waiting, []
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(body: Any, request: Request) -> Response:
        known(body, "torch_empty_cache")
        async with condition:
            server.paused = server.tokenizer_paused = False
            condition.notify_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(body: Any, request: Request) -> Response:
        if not server.is_idle:
            return PlainTextResponse("Flush cache failed.\n", 400)
        server.cache.clear()
        return PlainTextResponse("Cache flushed.\n")

    async def abort(body: Any, request: Request) -> Response:
        known(body, "rid", "abort_all")
        server.abort(body.get("rid", ""), body.get("abort_all", False))
        return Response()

    async def relabel(body: Any, request: Request) -> Response:
        known(body, "new_version", "abort_all_requests")
        if body.get("abort_all_requests", True):
            server.abort("", everything=True)
        server.label = body["new_version"]
        return JSONResponse({"success": True, "message": "…", "new_version": server.label})

    def memory(work: Any) -> Any:
        async def endpoint(body: Any, request: Request) -> Response:
            known(body, "tags")
            work(body["tags"])
            return JSONResponse(None)

        return endpoint

    def weights(work: Any) -> Any:
        async def endpoint(body: Any, request: Request) -> Response:
            async with server.busy:
                success, message, *rest = await asyncio.to_thread(work, body)
            answer = {"success": success, "message": message} | ({"num_paused_requests": rest[0]} if rest else {})
            return JSONResponse(answer, 200 if success else 400)

        return endpoint

    async def health(body: Any, request: Request) -> Response:
        return Response(status_code=503 if server.paused else 200)

    async def test(request: Request) -> Response:
        if request.method == "POST":
            body = await request.json()
            if body.pop("reset", False):
                server.reset()
                server.test = _Test()
            for name, value in body.pop("settings", {}).items():
                server.settings[name] = value
            for name, value in body.pop("state", {}).items():
                setattr(server, name, value)
            for name, value in body.items():
                setattr(server.test, name, value)
        state = {name: getattr(server, name) for name in ("label", "paused", "model_path")}
        state |= {"open": len(server.running) + len(server.waiting), "released": sorted(server.released)}
        return JSONResponse(state | dataclasses.asdict(server.test) | {"groups": list(server.groups)})

    return Starlette(
        routes=[
            route("/health", health, "GET"),
            route("/server_info", info, "GET"),
            route("/model_info", model_info, "GET"),
            route("/generate", generate, "POST"),
            route("/pause_generation", pause, "POST"),
            route("/continue_generation", go_on, "POST"),
            route("/flush_cache", flush, "GET", "POST"),
            route("/abort_request", abort, "POST"),
            route("/update_weight_version", relabel, "POST"),
            route("/update_weights_from_disk", weights(server.from_disk), "POST"),
            route("/init_weights_update_group", weights(server.init_group), "POST"),
            route("/destroy_weights_update_group", weights(server.destroy_group), "POST"),
            route("/update_weights_from_distributed", weights(server.from_distributed), "POST"),
            route("/release_memory_occupation", memory(server.release), "POST"),
            route("/resume_memory_occupation", memory(server.resume), "POST"),
            Route("/_test", test, methods=["GET", "POST"]),
        ]
    )


def known_request(body: dict[str, Any]) -> None:
    if unknown := body.keys() - REQUEST:
        raise ValueError(f"SGLang has no fields {unknown}")


async def _problem(server: Server, request: Request) -> Response | None:
    path, test = request.url.path, server.test
    if test.key and request.headers.get("authorization") != f"Bearer {test.key}":
        return JSONResponse({"error": "Unauthorized"}, 401)
    while path in server.test.hang:
        await asyncio.sleep(0.005)
    if path in test.fail:
        status, body = test.fail.pop(path)
        return PlainTextResponse(body, status) if isinstance(body, str) else JSONResponse(body, status)
    return None


async def _events(rows: list[Any]) -> AsyncGenerator[str, None]:
    for row in rows:
        yield f"data: {json.dumps(row)}\n\n"
    yield "data: [DONE]\n\n"


async def _stream(outputs: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(outputs):
        async for answer in outputs:
            yield f"data: {json.dumps(answer)}\n\n"
    yield "data: [DONE]\n\n"


async def _abort_late(server: Server, rid: str) -> None:
    await asyncio.sleep(2)
    server.abort(rid)


def main(directory: str, port_file: str) -> None:
    async def run() -> None:
        server = Server(Path(directory))
        server.logits(None, (1,))
        server.cache.clear()
        config = uvicorn.Config(application(server), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http.serve())
        while not http.started:
            await asyncio.sleep(0.005)
        part = Path(f"{port_file}.part")
        part.write_text(str(http.servers[0].sockets[0].getsockname()[1]))
        part.rename(port_file)
        stepping = asyncio.create_task(server.steps())
        await asyncio.wait({serving, stepping}, return_when=asyncio.FIRST_COMPLETED)
        if stepping.done():
            stepping.result()

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
