"""What a vLLM server says of itself, checked when the engine starts."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, cast

from slipstream.engines.remote.client import Client
from slipstream.errors import ConfigError, EngineLost
from slipstream.model.config import ModelConfig
from slipstream.weights.plan import DTYPE_BYTES

LEAST = (0, 30)
"""The first release whose workers can be joined by a unique id."""
TESTED = "0.30 and 0.32"
_FRESH = re.compile(r"default|slipstream-[0-9a-f]{8}-checkpoint")
"""The weight version of a server that nobody has updated: its own word, or that of an engine that was here before."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True)
class Server:
    """The settings of a server that concern us."""

    version: str
    model: str
    """The name that requests carry."""
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    """Of each worker; 0 where it does not say."""
    num_workers: int
    logprobs_mode: LogprobsMode
    can_sleep: bool
    has_priorities: bool
    has_weights: bool
    """Those of its checkpoint, and whole."""
    is_paused: bool
    nccl: str
    """Version, where it says."""


async def look(client: Client, model: ModelConfig) -> Server:
    """Asks the server. Raises `ConfigError` that says what is wrong with it and how to start it instead."""
    version = await _version(client)
    served = _rows(client, "GET /v1/models", await client.get("/v1/models"))
    info = await client.get("/server_info?config_format=json")
    ask = _Asked(client, "GET /server_info", info)
    _check(client, ask, model)
    paused = _flag(client, "/is_paused", "is_paused", await client.get("/is_paused"))
    label = _Asked(client, "GET /weight_info", await client.get("/weight_info")).text("weight_version")
    world = _Asked(client, "GET /get_world_size", await client.get("/get_world_size?include_dp=true"))
    found = re.search(r"nvidia-nccl-cu\d+==(\d+\.\d+\.\d+)", str(ask.get("system_env", "pip_packages", default="")))
    cache = ("vllm_config", "cache_config")
    return Server(
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
        has_weights=_FRESH.fullmatch(label) is not None
        and not paused
        and ask.get("vllm_config", "load_config", "load_format", default="") != "dummy",
        is_paused=paused,
        nccl=found.group(1) if found else "",
    )


async def _version(client: Client) -> str:
    answer = _Asked(client, "GET /version", await client.get("/version"))
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


def _check(client: Client, ask: _Asked, model: ModelConfig) -> None:
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


class Label:
    """The weight version that the server carries for us. A server that was restarted, or updated by someone else, carries
    another one: what it generated is then not what we think."""

    def __init__(self, client: Client) -> None:
        self._client, self._own, self._text = client, secrets.token_hex(4), ""

    def of(self, what: int | str) -> str:
        return f"slipstream-{self._own}-{what}"

    async def put(self, what: int | str) -> None:
        """On weights that stay as they are."""
        await self._client.post("/update_weight_version", {"new_version": self.of(what)})
        self.was_put(what)

    def was_put(self, what: int | str) -> None:
        self._text = self.of(what)

    async def check(self) -> None:
        expected, answer = self._text, await self._client.get("/weight_info")
        found = _Asked(self._client, "GET /weight_info", answer).text("weight_version")
        if found != expected:
            raise EngineLost(
                f"the vLLM server at {self._client.url} holds weights labelled {found!r} instead of {expected!r}: it was "
                "restarted, or somebody else updates it. Start this engine again"
            )


class _Asked:
    """An answer, read field by field."""

    def __init__(self, client: Client, call: str, answer: Any) -> None:
        self._client, self._call, self._answer = client, call, answer

    def get(self, *path: str, default: Any) -> Any:
        found = self._answer
        for key in path:
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return found

    def has(self, *path: str) -> bool:
        return self.get(*path, default=None) is not None

    def text(self, *path: str) -> str:
        return cast(str, self._of(str, path))

    def number(self, *path: str) -> int:
        return cast(int, self._of(int, path))

    def _of(self, kind: type, path: tuple[str, ...]) -> Any:
        found = self.get(*path, default=None)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise self._client.nonsense(self._call, f"{kind.__name__} at {'.'.join(path)}", self._answer)
        return found


def _rows(client: Client, call: str, answer: Any) -> list[Any]:
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or "id" not in rows[0]:
        raise client.nonsense(call, "a list of models", answer)
    return rows


def _flag(client: Client, path: str, name: str, answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get(name), bool):
        raise client.nonsense(f"GET {path}", f"true or false at {name}", answer)
    return bool(answer[name])
