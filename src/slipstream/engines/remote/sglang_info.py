"""Reads the settings of an SGLang server and checks that we can use it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.engines.remote.dialect import CHECKPOINT_LABEL
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.responses import ResponseReader, get_response
from slipstream.engines.remote.server_info import ServerInfo
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.weights.plan import DTYPE_BYTES

MIN_VERSION = (0, 5, 16)
"""The first release that reports the logprobs of a truncated distribution."""
WRITTEN_FOR = "0.5.18"
"""The release whose source this dialect follows."""
_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class SglangServerInfo(ServerInfo):
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    is_deterministic: bool
    """Whether it honors seeds."""
    priority_sign: int
    """Factor from our priorities, of which the lowest goes first, to the server's; 0 if it has none."""
    keeps_weights: bool
    """Whether weights survive a sleep, in host memory."""
    can_join: bool
    """Whether its workers can join a trainer's process group."""


async def inspect_server(client: ServerClient, model: ModelConfig) -> SglangServerInfo:
    """Read the settings. Raise `ConfigError`, with the right way to start the server, if we cannot use it."""
    info = await get_response(client, "/server_info")
    version = _version(client, info)
    _check(client, info, model)
    model_info = await get_response(client, "/model_info")
    label, load_format = model_info.text("weight_version"), model_info.get("load_format", default="")
    has_weights = CHECKPOINT_LABEL.fullmatch(label) is not None and load_format != "dummy"
    page_size = info.number("page_size")
    is_split = info.number("pp_size") > 1 or (info.number("dp_size") > 1 and not info.flag("enable_dp_attention"))
    sign = 1 if info.get("schedule_low_priority_values_first", default=False) is True else -1
    dtype = info.text("dtype")
    return SglangServerInfo(
        version=version,
        dtype=_DTYPES.get(dtype, dtype),
        max_model_len=info.number("max_req_input_len") - 1,  # so that a whole completion can be scored
        block_size=page_size,
        num_blocks=max(1, info.number("max_total_num_tokens") // page_size - 2),  # it reserves two
        kv_cache_bytes=_kv_cache_bytes(info),
        num_workers=info.number("tp_size"),
        can_sleep=info.flag("enable_memory_saver"),
        has_weights=has_weights,
        is_paused=not has_weights,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        is_deterministic=info.flag("enable_deterministic_inference"),
        priority_sign=sign if info.flag("enable_priority_scheduling") else 0,
        keeps_weights=info.flag("enable_weights_cpu_backup"),
        can_join=not is_split,
    )


def _version(client: ServerClient, info: ResponseReader) -> str:
    version = info.text("version")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        raise client.mismatch("GET /server_info", "a version like 0.5.18", version)
    if tuple(int(part) for part in numbers.groups()) < MIN_VERSION:
        raise ConfigError(
            f"{client.name} is version {version}; Slipstream needs {'.'.join(map(str, MIN_VERSION))} or later (written for "
            f"{WRITTEN_FOR}), which reports the logprobs that a loss needs"
        )
    return version


def _check(client: ServerClient, info: ResponseReader, model: ModelConfig) -> None:
    if not info.flag("incremental_streaming_output"):
        raise ConfigError(
            f"{client.name} repeats the whole completion in every event; start it with --incremental-streaming-output"
        )
    if (dtype := info.text("dtype")) == "auto":
        raise ConfigError(f"{client.name} does not report its dtype; start it with --dtype bfloat16, or another")
    if _DTYPES.get(dtype, dtype) not in DTYPE_BYTES:
        raise ConfigError(f"{client.name} holds {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
    for name, what in (("quantization", "quantizes its weights"), ("speculative_algorithm", "uses a draft model")):
        if (value := info.get(name, default=None)) is not None:
            raise ConfigError(f"{client.name} {what} ({value}), which Slipstream cannot update with the policy")
    if info.get("disaggregation_mode", default="null") != "null":
        raise ConfigError(
            f"{client.name} is half of a disaggregated server (disaggregation_mode), which is unsupported"
        )
    if info.number("max_req_input_len") >= model.max_position_embeddings:
        raise ConfigError(
            f"{client.name} takes {info.number('max_req_input_len')} tokens, but the model in --model only "
            f"{model.max_position_embeddings}: does it serve another model?"
        )


def _kv_cache_bytes(info: ResponseReader) -> int:
    """Return the size of each worker's KV cache; 0 if unknown."""
    states = info.get("internal_states", default=None)
    usage = (
        states[0].get("memory_usage") if isinstance(states, list) and states and isinstance(states[0], dict) else None
    )
    gibibytes = usage.get("kvcache") if isinstance(usage, dict) else None
    return int(gibibytes * 2**30) if isinstance(gibibytes, (int, float)) else 0
