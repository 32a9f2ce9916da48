"""A `vllm serve` (0.30 or later), with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any, cast

from slipstream.engines.remote import vllm_words as words
from slipstream.engines.remote.client import Client
from slipstream.engines.remote.dialect import FRESH, Dialect, Scores
from slipstream.engines.remote.server import Asked
from slipstream.engines.remote.vllm_words import LogprobsMode, VllmServer
from slipstream.engines.sequence import Sample
from slipstream.errors import ConfigError, SlipstreamError, Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import MemoryTag, Parameter, SamplingParams
from slipstream.weights.plan import DTYPE_BYTES
from slipstream.weights.transports import vllm_nccl

LEAST = (0, 30)
"""The first release whose workers can be joined by a unique id."""
TESTED = "0.30 and 0.32"
JOIN_SECONDS = 150.0
"""Longer than a trainer waits, so that it is the one to give up."""
UPDATE_SECONDS = 600.0
RESET_SECONDS = 30.0


class VllmDialect(Dialect):
    takes_all, idle_to_sleep, steps_when_awake = True, False, True
    transports = (vllm_nccl.NAME,)
    server: VllmServer

    @classmethod
    async def meet(cls, client: Client, model: ModelConfig) -> VllmDialect:
        """Raises `ConfigError` that says what is wrong with the server and how to start it instead."""
        return cls(client, await _look(client, model))

    async def settle(self) -> None:
        if self.server.is_paused:
            if self.server.can_sleep:
                await self.client.post("/wake_up")
            await self.pause()

    # --- requests ---

    async def needs_score(self, sampling: SamplingParams) -> bool:
        return words.needs_score(sampling, self.server)

    async def draw(self, sample: Sample, version: int, salt: str, count: int) -> None:
        body = words.completion_request(sample, self.server, salt)
        async with contextlib.aclosing(self.client.events(words.PATH, body)) as events:
            async for event in events:
                if words.take_event(sample, event, version, count, self.client.nonsense) or sample.stopped:
                    break

    async def scores(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> Scores:
        body = words.score_request(tokens, top_k, self.server, salt, priority)
        answer = await self.client.post(words.PATH, body, math.inf)
        return Scores(*words.take_score(answer, tokens, top_k, self.client.nonsense), None)

    # --- control ---

    async def check_alive(self) -> None:
        await self.client.get("/health")

    async def pause(self) -> None:
        await self.client.post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self.client.post("/resume")

    def check_sleep(self, level: int) -> None:
        if not self.server.can_sleep:
            raise Unsupported(f"{self.where} was started without --enable-sleep-mode")

    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        if asleep:  # vLLM goes to sleep from being awake
            await self.client.post("/wake_up")
        await self.client.post(f"/sleep?level={level}&mode=keep")

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self.client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def forget_prefixes(self) -> None:
        path, answer = "/reset_prefix_cache?reset_running_requests=true", None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESET_SECONDS):
                while True:
                    answer = await self.client.post(path)
                    if isinstance(answer, dict) and answer.get("success") is True:
                        return
                    await asyncio.sleep(0.05)  # requests that were cut off may hold blocks for a moment
        raise self.client.nonsense(f"POST {path}", f"success within {RESET_SECONDS:g} s", answer)

    # --- weights ---

    async def label(self) -> str:
        return Asked(self.client, "GET /weight_info", await self.client.get("/weight_info")).text("weight_version")

    async def put_label(self, text: str) -> None:
        await self.client.post("/update_weight_version", {"new_version": text})

    def way(self, transport: str) -> _Nccl:
        return _Nccl(self, vllm_nccl.invited(transport))


class _Nccl:
    """The workers join the trainer's communicator, and take what it broadcasts."""

    def __init__(self, dialect: VllmDialect, unique_id: str) -> None:
        self.key, self._dialect, self._client = unique_id, dialect, dialect.client
        self._world_size = 1 + dialect.server.num_workers
        self.link = vllm_nccl.make_link(unique_id, self._world_size, dialect.client.url, dialect.server.nccl)

    async def join(self) -> None:
        info = {
            "nccl_unique_id_b64": self.key,
            "rank_offset": 1,
            "world_size": self._world_size,
            "packed": True,
            "packed_buffer_size_bytes": vllm_nccl.BUFFER_BYTES,
            "packed_num_buffers": vllm_nccl.NUM_BUFFERS,
        }
        await self._client.post("/init_weight_transfer_engine", {"init_info": info}, JOIN_SECONDS)

    async def replace(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        info = {
            "names": [p.name for p in parameters],
            "dtype_names": [self._dialect.server.dtype] * len(parameters),
            "shapes": [list(p.shape) for p in parameters],
        }
        await self._start()
        await self._client.post("/update_weights", {"update_info": info}, UPDATE_SECONDS)
        await self._client.post("/finish_weight_update", {"weight_version": label}, UPDATE_SECONDS)
        await self._dialect.forget_prefixes()

    async def _start(self) -> None:
        try:
            await self._client.post("/start_weight_update")
        except SlipstreamError as error:  # one that was broken off may be open still
            try:
                await self._client.post("/finish_weight_update")
            except SlipstreamError:
                raise error from None
            await self._client.post("/start_weight_update")

    async def leave(self) -> None:
        """The next one takes its place."""


# --- what it says of itself ---


async def _look(client: Client, model: ModelConfig) -> VllmServer:
    version = await _version(client)
    served = _rows(client, "GET /v1/models", await client.get("/v1/models"))
    info = await client.get("/server_info?config_format=json")
    ask = Asked(client, "GET /server_info", info)
    _check(client, ask, model)
    paused = Asked(client, "GET /is_paused", await client.get("/is_paused")).flag("is_paused")
    label = Asked(client, "GET /weight_info", await client.get("/weight_info")).text("weight_version")
    world = Asked(client, "GET /get_world_size", await client.get("/get_world_size?include_dp=true"))
    found = re.search(r"nvidia-nccl-cu\d+==(\d+\.\d+\.\d+)", str(ask.get("system_env", "pip_packages", default="")))
    cache = ("vllm_config", "cache_config")
    return VllmServer(
        version=version,
        model=str(served[0]["id"]),
        dtype=ask.text("vllm_config", "model_config", "dtype").removeprefix("torch."),
        max_model_len=ask.number("vllm_config", "model_config", "max_model_len"),
        block_size=ask.number(*cache, "block_size"),
        num_blocks=ask.number(*cache, "num_gpu_blocks"),
        kv_cache_bytes=ask.number(*cache, "kv_cache_memory_bytes") if ask.has(*cache, "kv_cache_memory_bytes") else 0,
        num_workers=world.number("world_size"),
        logprobs_mode=cast(LogprobsMode, ask.text("vllm_config", "model_config", "logprobs_mode")),
        can_sleep=ask.get("vllm_config", "model_config", "enable_sleep_mode", default=False) is True,
        has_priorities=ask.get("vllm_config", "scheduler_config", "policy", default="") == "priority",
        # A paused server may have been left in the middle of an update; one with another label had one.
        has_weights=FRESH.fullmatch(label) is not None
        and not paused
        and ask.get("vllm_config", "load_config", "load_format", default="") != "dummy",
        is_paused=paused,
        nccl=found.group(1) if found else "",
    )


async def _version(client: Client) -> str:
    answer = Asked(client, "GET /version", await client.get("/version"))
    version = answer.text("version")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise client.nonsense("GET /version", "a version like 0.32.0", version)
    if (int(numbers[1]), int(numbers[2])) < LEAST:
        raise ConfigError(
            f"the vLLM server at {client.url} is version {version}; Slipstream needs {LEAST[0]}.{LEAST[1]} or later (tested "
            f"with {TESTED}), whose workers a JAX trainer can join"
        )
    return version


def _check(client: Client, ask: Asked, model: ModelConfig) -> None:
    where = f"the vLLM server at {client.url}"
    backend = ask.get("vllm_config", "weight_transfer_config", default=None)
    if not isinstance(backend, dict) or backend.get("backend") != "nccl":
        raise ConfigError(
            f"{where} takes no weights over NCCL (its weight_transfer_config is {backend!r}); start it with "
            """--weight-transfer-config '{"backend": "nccl"}'"""
        )
    mode = ask.text("vllm_config", "model_config", "logprobs_mode")
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise ConfigError(
            f"{where} reports {mode} instead of logprobs; start it with --logprobs-mode processed_logprobs"
        )
    dtype = ask.text("vllm_config", "model_config", "dtype").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{where} holds {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
    if (quantization := ask.get("vllm_config", "model_config", "quantization", default=None)) is not None:
        raise ConfigError(f"{where} quantises its weights ({quantization}); Slipstream knows no such layout")
    length = ask.number("vllm_config", "model_config", "max_model_len")
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"{where} takes {length} tokens, the model in --model {model.max_position_embeddings}: is it another model?"
        )


def _rows(client: Client, call: str, answer: Any) -> list[Any]:
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or "id" not in rows[0]:
        raise client.nonsense(call, "a list of models", answer)
    return rows
