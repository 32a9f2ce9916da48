"""From an engine's settings to vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engines.vllm import compat
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.types import MAX_TOP_LOGPROBS
from slipstream.weights.image import numpy_dtype

_BLOCK = {"cpu": 128, "gpu": 16}
"""Tokens of a block of vLLM's KV cache."""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Without this, vLLM compiles a helper of its sampler with a C++ compiler, at the first token, for a minute.
    "TORCHDYNAMO_DISABLE": "1",
}


def make_llm(directory: Path, model: ModelConfig, options: EngineConfig, has_weights: bool) -> Any:
    """vLLM's asynchronous engine, started. Raises `ConfigError` for what it cannot do."""
    _set(_ENVIRONMENT)
    _set(compat.choose_runner(compat.check()))
    on_cpu = compat.is_cpu()
    if on_cpu:
        _prepare_cpu(model, options)
    elif options.dtype == "float32":
        # Else its attention kernel rounds to TF32: three digits, where seven were asked for.
        _set({"TRITON_F32_DEFAULT": "ieee"})
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    block = _BLOCK["cpu" if on_cpu else "gpu"]
    length = options.max_model_len or model.max_position_embeddings
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": options.dtype,
        "enforce_eager": on_cpu or options.eager,
        "max_model_len": length,
        "max_num_seqs": options.max_concurrency,
        "tensor_parallel_size": options.tp,
        "enable_prefix_caching": options.prefix_cache,
        "block_size": block,
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,  # prompts come as tokens, and text is made here
        "worker_extension_cls": "slipstream.engines.vllm.extension.Extension",
        "scheduler_cls": "slipstream.engines.vllm.scheduler.make",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }
    if on_cpu or options.kv_cache_tokens:
        tokens = options.kv_cache_tokens or options.max_concurrency * length
        arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(model, options, tokens, block)
    if not on_cpu:
        # What must be free when it starts. Where the KV cache has a size, that is all that vLLM makes of it.
        arguments["gpu_memory_utilization"] = 0.01 if options.kv_cache_tokens else options.memory_share
    if on_cpu:
        arguments["async_scheduling"] = False  # nothing to hide behind: the scheduler's core is one of the workers'
    else:
        arguments["enable_sleep_mode"] = True
    if options.prefill_tokens:
        arguments["max_num_batched_tokens"] = options.prefill_tokens
    # As for vLLM's own `LLM`: rollouts are large batches, and its defaults for servers make small steps of them.
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


def _prepare_cpu(model: ModelConfig, options: EngineConfig) -> None:
    _set(_ON_CPU)
    if options.tp > 1:  # else every worker takes all cores, and they wait for each other
        _set({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.tp))})
    if options.dtype != "float32":
        raise ConfigError(f"dtype is {options.dtype!r}: vLLM on CPU is used with float32 here")
    if model.head_dim % 32:
        raise ConfigError(
            f"the model's heads have {model.head_dim} dimensions; vLLM's attention on CPU takes multiples of 32 only"
        )


def _kv_cache_bytes(model: ModelConfig, options: EngineConfig, tokens: int, block: int) -> int:
    # Every sequence begins a block; vLLM keeps one for itself.
    num_blocks = -(-tokens // block) + options.max_concurrency + 2
    kv_heads = max(1, model.num_kv_heads // options.tp)
    itemsize = numpy_dtype(options.dtype).itemsize
    return num_blocks * block * 2 * model.num_layers * kv_heads * model.head_dim * itemsize


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
