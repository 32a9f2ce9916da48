"""From an engine's settings to vLLM's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engines.vllm import compat
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.types import MAX_TOP_LOGPROBS

_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU."""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Without this, vLLM compiles a helper of its sampler with a C++ compiler, at the first token, for a minute.
    "TORCHDYNAMO_DISABLE": "1",
    # Our extension knows the first one.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def make_llm(directory: Path, model: ModelConfig, options: EngineConfig, has_weights: bool) -> Any:
    """vLLM's asynchronous engine, started. Raises `ConfigError` for what it cannot do."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.tp > 1:  # else every worker takes all cores, and they wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.tp)))
    compat.check()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if not current_platform.is_cpu():
        raise ConfigError(
            f"this vLLM is built for {current_platform.device_name}; so far Slipstream drives vLLM on CPU only "
            "(`slipstream setup vllm --cpu`). On a GPU, use the embedded engine"
        )
    if options.dtype != "float32":
        raise ConfigError(f"dtype is {options.dtype!r}: vLLM on CPU is used with float32 here")
    if model.head_dim % 32:
        raise ConfigError(
            f"the model's heads have {model.head_dim} dimensions; vLLM's attention on CPU takes multiples of 32 only"
        )
    length = options.max_model_len or model.max_position_embeddings
    tokens = options.kv_cache_tokens or options.max_concurrency * length
    # Every sequence begins a block; vLLM keeps one for itself.
    num_blocks = -(-tokens // _BLOCK) + options.max_concurrency + 2
    kv_heads = max(1, model.num_kv_heads // options.tp)
    block_bytes = _BLOCK * 2 * model.num_layers * kv_heads * model.head_dim * 4
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": length,
        "max_num_seqs": options.max_concurrency,
        "tensor_parallel_size": options.tp,
        "enable_prefix_caching": options.prefix_cache,
        "block_size": _BLOCK,
        "kv_cache_memory_bytes": num_blocks * block_bytes,
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,  # prompts come as tokens, and text is made here
        "worker_extension_cls": "slipstream.engines.vllm.extension.Extension",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "scheduling_policy": "priority",
        "async_scheduling": False,  # so that a worker knows between two steps what was drawn
        "disable_log_stats": True,
    }
    if options.prefill_tokens:
        arguments["max_num_batched_tokens"] = options.prefill_tokens
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
