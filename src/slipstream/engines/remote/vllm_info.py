"""Reads the settings of a `vllm serve` and checks that we can use it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from slipstream.engines.remote.dialect import CHECKPOINT_LABEL, ServerInfo
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.responses import ResponseReader, check_version, get_response
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.weights.plan import DTYPE_BYTES

MIN_VERSION = (0, 30)
"""The first release whose workers can be joined by a unique id."""
TESTED = "0.30 and 0.32"

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True)
class VllmServerInfo(ServerInfo):
    model: str
    """The model name that requests carry."""
    logprobs_mode: LogprobsMode
    has_priorities: bool
    nccl: str
    """NCCL version; empty if unknown."""


async def inspect_server(client: ServerClient, model: ModelConfig) -> VllmServerInfo:
    """Read the settings. Raise `ConfigError`, with the right way to start the server, if we cannot use it."""
    version = (await get_response(client, "/version")).text("version")
    check_version(
        client, "GET /version", version, MIN_VERSION, f"(tested with {TESTED}), whose workers a JAX trainer can join"
    )
    models = await get_response(client, "/v1/models")
    info = await get_response(client, "/server_info?config_format=json")
    _check(client, info, model)
    is_paused = (await get_response(client, "/is_paused")).flag("is_paused")
    label = (await get_response(client, "/weight_info")).text("weight_version")
    world = await get_response(client, "/get_world_size?include_dp=true")
    nccl = re.search(r"nvidia-nccl-cu\d+==(\d+\.\d+\.\d+)", str(info.get("system_env", "pip_packages", default="")))
    cache = ("vllm_config", "cache_config")
    has_cache_bytes = info.get(*cache, "kv_cache_memory_bytes", default=None) is not None
    load_format = info.get("vllm_config", "load_config", "load_format", default="")
    return VllmServerInfo(
        version=version,
        model=models.text("data", 0, "id"),
        dtype=info.text("vllm_config", "model_config", "dtype").removeprefix("torch."),
        max_model_len=info.number("vllm_config", "model_config", "max_model_len"),
        block_size=info.number(*cache, "block_size"),
        num_blocks=info.number(*cache, "num_gpu_blocks"),
        kv_cache_bytes=info.number(*cache, "kv_cache_memory_bytes") if has_cache_bytes else 0,
        num_workers=world.number("world_size"),
        logprobs_mode=cast(LogprobsMode, info.text("vllm_config", "model_config", "logprobs_mode")),
        can_sleep=info.get("vllm_config", "model_config", "enable_sleep_mode", default=False) is True,
        has_priorities=info.get("vllm_config", "scheduler_config", "policy", default="") == "priority",
        # A paused server may be in the middle of an update; a different label means it had one.
        has_weights=CHECKPOINT_LABEL.fullmatch(label) is not None and not is_paused and load_format != "dummy",
        is_paused=is_paused,
        nccl=nccl.group(1) if nccl else "",
    )


def _check(client: ServerClient, info: ResponseReader, model: ModelConfig) -> None:
    transfer = info.get("vllm_config", "weight_transfer_config", default=None)
    if not isinstance(transfer, dict) or transfer.get("backend") != "nccl":
        raise ConfigError(
            f"{client.name} takes no weights over NCCL (its weight_transfer_config is {transfer!r}); start it with "
            """--weight-transfer-config '{"backend": "nccl"}'"""
        )
    mode = info.text("vllm_config", "model_config", "logprobs_mode")
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise ConfigError(
            f"{client.name} reports {mode} instead of logprobs; start it with --logprobs-mode processed_logprobs"
        )
    dtype = info.text("vllm_config", "model_config", "dtype").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{client.name} holds {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
    if (quantization := info.get("vllm_config", "model_config", "quantization", default=None)) is not None:
        raise ConfigError(f"{client.name} quantizes its weights ({quantization}), which Slipstream does not support")
    length = info.number("vllm_config", "model_config", "max_model_len")
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"{client.name} takes {length} tokens, but the model in --model only {model.max_position_embeddings}: does it "
            "serve another model?"
        )
