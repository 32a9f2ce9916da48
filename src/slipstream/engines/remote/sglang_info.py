"""Reads the settings of an SGLang server and checks that we can use it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engines.remote.dialect import CHECKPOINT_LABEL, ServerInfo
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.responses import ResponseReader, check_version, get_response
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
    version, why = info.text("version"), f"(written for {WRITTEN_FOR}), which reports the logprobs that a loss needs"
    check_version(client, "GET /server_info", version, MIN_VERSION, why)
    _check(client, info, model)
    model_info = await get_response(client, "/model_info")
    label, load_format = model_info.text("weight_version"), model_info.get("load_format", default="")
    has_weights = CHECKPOINT_LABEL.fullmatch(label) is not None and load_format != "dummy"
    page_size = info.number("page_size")
    is_split = info.number("pp_size") > 1 or (info.number("dp_size") > 1 and not info.flag("enable_dp_attention"))
    sign = 1 if info.get("schedule_low_priority_values_first", default=False) is True else -1
    dtype, gibibytes = info.text("dtype"), info.get("internal_states", 0, "memory_usage", "kvcache", default=None)
    return SglangServerInfo(
        version=version,
        dtype=_DTYPES.get(dtype, dtype),
        max_model_len=info.number("max_req_input_len") - 1,  # so that a whole completion can be scored
        block_size=page_size,
        num_blocks=max(1, info.number("max_total_num_tokens") // page_size - 2),  # it reserves two
        kv_cache_bytes=int(gibibytes * 2**30) if isinstance(gibibytes, (int, float)) else 0,
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
