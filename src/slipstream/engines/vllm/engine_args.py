"""vLLM's engine arguments and environment, from a `VllmConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from slipstream.config import AdapterConfig, Device, VllmConfig
from slipstream.engines.vllm import compat
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.checkpoints.served_model import ServedModel
from slipstream.model.lora import adapter_support
from slipstream.types import MAX_TOP_LOGPROBS
from slipstream.vllm_arguments import LORA_RANKS, check_known
from slipstream.weights.rank_image import numpy_dtype

_BLOCK_SIZE = {"cpu": 128, "gpu": 16}
"""Tokens per block of vLLM's KV cache."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise vLLM compiles a helper of its sampler with a C++ compiler at the first token, which takes a minute.
    "TORCHDYNAMO_DISABLE": "1",
}


def make_llm(directory: Path, model: ServedModel, options: VllmConfig, has_weights: bool) -> Any:
    """Start vLLM's asynchronous engine. Raise `ConfigError` for settings it does not support."""
    set_defaults(ENVIRONMENT)
    version = compat.check()
    if options.draft_model or options.adapters:
        set_defaults({"VLLM_USE_V2_MODEL_RUNNER": "0"})  # where we know the places of draft and adapters
    set_defaults(compat.choose_runner(version))
    on_cpu = compat.is_cpu()
    if options.deterministic:
        _check_batch_invariance()
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if options.pipeline_parallel_size > 1 and "VLLM_PP_LAYER_PARTITION" in os.environ:
        raise ConfigError("VLLM_PP_LAYER_PARTITION moves layers between stages, and updates would not follow; unset it")
    if on_cpu:
        compat.inspect_models_here()
        _prepare_cpu(options)
    elif options.dtype == "float32":
        # Otherwise its attention kernel rounds to TF32, which has three digits instead of seven.
        set_defaults({"TRITON_F32_DEFAULT": "ieee"})
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    block = int(options.vllm.get("block_size", _BLOCK_SIZE["cpu" if on_cpu else "gpu"]))
    length = options.max_model_len or (None if model.config is None else model.config.max_position_embeddings)
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": options.dtype,
        "enforce_eager": on_cpu or options.enforce_eager,
        "max_model_len": length,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": options.enable_prefix_caching,
        "block_size": block,
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,  # we tokenize and detokenize
        "worker_extension_cls": "slipstream.engines.vllm.worker_extension.WorkerExtension",
        "scheduler_cls": "slipstream.engines.vllm.batched_output.make_scheduler",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }
    if on_cpu:
        arguments["async_scheduling"] = False  # the scheduler shares its cores with the workers
    else:
        # Sleep mode has an allocator of its own, whose memory cannot be shared.
        arguments["enable_sleep_mode"] = not options.share_weights
        # With a KV cache of fixed size, vLLM only checks that this share is free when it starts.
        arguments["gpu_memory_utilization"] = 0.01 if options.kv_cache_tokens else options.gpu_memory_utilization
    if options.adapters:
        arguments |= _adapter_arguments(options.adapters, model, options.dtype)
    if options.max_num_batched_tokens:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if not on_cpu and len(set(options.devices)) < len(options.devices):
        set_defaults({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        # vLLM chooses `mp` by itself only if there are as many GPUs as ranks. Its own all-reduce needs several.
        arguments |= {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    # The defaults of vLLM's offline `LLM`: rollouts are large batches, and its server defaults take small steps.
    context = UsageContext.LLM_CLASS
    kind = _args_class(options.devices)
    check_known(options.vllm, [field.name for field in fields(kind)], version)
    arguments |= options.vllm
    if options.draft_model:
        draft = str(model_directory(options.draft_model))
        arguments["speculative_config"] = {**options.vllm["speculative_config"], "model": draft}
    try:
        config = kind(**arguments).create_engine_config(context)
    except Exception as error:
        if not options.vllm:
            raise
        given = ", ".join(f"{name}={value!r:.80}" for name, value in options.vllm.items())
        raise ConfigError(f"vLLM {version} refuses its arguments ({given}): {error}") from None
    if config.model_config.runner_type != ("pooling" if model.num_labels else "generate"):
        named = config.model_config.architectures
        raise ConfigError(f"vLLM generates no tokens with this model; architectures in its config.json is {named}")
    head_dim = config.model_config.get_head_size()
    if on_cpu and head_dim % 32:
        raise ConfigError(f"head_dim of the model is {head_dim}; vLLM's attention on CPU needs a multiple of 32")
    if on_cpu or options.kv_cache_tokens:
        tokens = options.kv_cache_tokens or options.max_num_seqs * config.model_config.max_model_len
        models = [config.model_config]
        if options.draft_model:
            models.append(config.speculative_config.draft_model_config)
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(models, options, tokens, block)
    return AsyncLLM.from_vllm_config(config, usage_context=context, disable_log_stats=arguments["disable_log_stats"])


def _adapter_arguments(adapters: AdapterConfig, model: ServedModel, dtype: str) -> dict[str, Any]:
    if model.num_labels:
        raise ConfigError("adapters of a model for sequence classification have not been tried in vLLM; drop adapters")
    if compat.is_cpu() and any(".experts." in tensor.name for tensor in model.tensors):
        raise ConfigError("vLLM on CPU cannot compute experts while adapters are enabled: drop adapters, or use a GPU")
    if dtype == "float32" and not compat.is_cpu():
        raise ConfigError(
            "dtype is 'float32'; on a GPU, vLLM computes adapters in 16 bits only: set dtype=\"bfloat16\""
        )
    return {
        "enable_lora": True,
        # On CPU, vLLM computes rows without an adapter with the last slot, if others have one: it stays zero.
        "max_loras": adapters.slots + compat.is_cpu(),
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= adapters.rank),
        "lora_target_modules": list(adapter_support(adapters, model.tensors).targets),
    }


def _check_batch_invariance() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or not current_platform.has_device_capability(80):
        raise ConfigError(
            f"deterministic needs vLLM's batch-invariant mode, which NVIDIA GPUs have from compute capability 8.0; here vLLM "
            f"computes on {current_platform.device_type}"
        )


def _args_class(devices: Sequence[Device]) -> type[Any]:
    """Return a class of vLLM's arguments, with which several ranks may be on one GPU; its own `device_ids` may not name a GPU
    twice."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    class PlacedEngineArgs(AsyncEngineArgs):
        def _resolve_device_ids(self) -> list[int] | None:
            return [current_platform.device_control_id_to_physical_device_id(str(device)) for device in devices]

    return PlacedEngineArgs if len(set(devices)) < len(devices) and current_platform.is_cuda() else AsyncEngineArgs


def _prepare_cpu(options: VllmConfig) -> None:
    set_defaults(_ON_CPU)
    if options.num_ranks > 1:  # otherwise every worker uses all cores, and they contend
        set_defaults({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.num_ranks))})
    if options.dtype != "float32":
        raise ConfigError(f'dtype is {options.dtype!r}; vLLM on CPU is supported with dtype="float32" only')


def _kv_cache_bytes(models: Sequence[Any], options: VllmConfig, tokens: int, block: int) -> int:
    """`models` are vLLM's configs of the models that share the cache."""
    # Every sequence may leave a block partly filled, and vLLM reserves one.
    num_blocks = -(-tokens // block) + options.max_num_seqs + 2
    itemsize, size = numpy_dtype(options.dtype).itemsize, 0
    for model in models:
        kv_heads = max(1, model.get_total_num_kv_heads() // options.tensor_parallel_size)
        layers = -(-model.get_total_num_hidden_layers() // options.pipeline_parallel_size)
        size += num_blocks * block * 2 * layers * kv_heads * model.get_head_size() * itemsize
    return int(size)


def set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
