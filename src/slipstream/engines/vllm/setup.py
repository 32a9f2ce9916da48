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
from slipstream.weights.image import numpy_dtype


def make_llm(directory: Path, model: ModelConfig, options: EngineConfig, has_weights: bool) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.tp > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    compat.check()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        # Without this, vLLM compiles a helper of its sampler with a C++ compiler, at the first token, for a minute.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if on_cpu and options.dtype != "float32":
        raise ConfigError(f"dtype is {options.dtype!r}: vLLM on CPU is used with float32 here")
    if on_cpu and model.head_dim % 32:
        raise ConfigError(
            f"the model's heads have {model.head_dim} dimensions; vLLM's attention on CPU takes multiples of 32 only"
        )
    length = options.max_model_len or model.max_position_embeddings
    tokens = options.kv_cache_tokens or options.max_concurrency * length
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * numpy_dtype(options.dtype).itemsize
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": options.dtype,
        "max_model_len": length,
        "max_num_seqs": options.max_concurrency,
        "tensor_parallel_size": options.tp,
        "enable_prefix_caching": options.prefix_cache,
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,  # prompts come as tokens, and text is made here
        "worker_extension_cls": "slipstream.engines.vllm.extension.Extension",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "scheduling_policy": "priority",
        "async_scheduling": False,  # so that a worker knows between two steps what was drawn
        "disable_log_stats": True,
    }
    if on_cpu:
        # A block of 128 tokens, and one for each sequence to begin with; vLLM keeps one for itself.
        blocks = -(-tokens // 128) + options.max_concurrency + 2
        arguments |= {"enforce_eager": True, "block_size": 128}
        arguments["kv_cache_memory_bytes"] = blocks * 128 * token_bytes // options.tp
    if options.prefill_tokens:
        arguments["max_num_batched_tokens"] = options.prefill_tokens
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
