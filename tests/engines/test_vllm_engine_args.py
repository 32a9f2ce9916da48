"""vLLM's arguments from a `VllmConfig`, with a stand-in for vLLM."""

from __future__ import annotations

import os
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import AdapterConfig, VllmConfig
from slipstream.engines.vllm import compat
from slipstream.engines.vllm.engine_args import make_llm
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.served_model import ServedModel
from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors
from slipstream.model.lora import targets
from tests.engines.pretend import pretend
from tests.tiny import tiny_config

CONFIG = tiny_config(head_dim=32)
NAMES = [
    "model",
    "dtype",
    "enforce_eager",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "enable_prefix_caching",
    "load_format",
    "skip_tokenizer_init",
    "worker_extension_cls",
    "scheduler_cls",
    "logprobs_mode",
    "max_logprobs",
    "scheduling_policy",
    "enable_sleep_mode",
    "gpu_memory_utilization",
    "async_scheduling",
    "block_size",
    "disable_log_stats",
    "distributed_executor_backend",
    "disable_custom_all_reduce",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "lora_target_modules",
]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in on two GPUs of compute capability 9.0: an engine is its config, with its arguments."""

    def create_engine_config(arguments: Any, context: Any) -> Any:
        if arguments.kv_cache_dtype == "fp3":
            raise ValueError("kv_cache_dtype: Input should be 'auto' or 'fp8'")
        model = SimpleNamespace(
            runner_type="generate",
            max_model_len=arguments.max_model_len,
            get_head_size=lambda: CONFIG.head_dim,
            get_total_num_kv_heads=lambda: CONFIG.num_kv_heads,
            get_total_num_hidden_layers=lambda: CONFIG.num_layers,
        )
        return SimpleNamespace(
            arguments=vars(arguments) | {"device_ids": arguments._resolve_device_ids()},
            model_config=model,
            cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        )

    methods = {"create_engine_config": create_engine_config, "_resolve_device_ids": lambda self: None}
    kind = make_dataclass("AsyncEngineArgs", [(name, Any, None) for name in NAMES], namespace=methods)
    platform = SimpleNamespace(
        device_type="cuda",
        is_cuda=lambda: platform.device_type == "cuda",
        is_cpu=lambda: platform.device_type == "cpu",
        has_device_capability=lambda least: least <= 90,
        device_control_id_to_physical_device_id=int,
    )
    engine = SimpleNamespace(from_vllm_config=lambda config, **_: config)
    contents: dict[str, dict[str, Any]] = {
        "vllm.engine.arg_utils": {"AsyncEngineArgs": kind},
        "vllm.platforms": {"current_platform": platform},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="llm")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": engine},
    }
    pretend(monkeypatch, contents)
    monkeypatch.setattr(compat, "check", lambda: "0.32.1")
    monkeypatch.setattr(os, "environ", {})
    return platform


def made(dtype: str = "float32", config: ModelConfig = CONFIG, num_labels: int = 0, **settings: Any) -> Any:
    model = ServedModel("llama", tensors(config), config.vocab_size, (), "float32", config, num_labels)
    return make_llm(Path("m"), model, VllmConfig(dtype=dtype, **settings), has_weights=False)


def test_arguments_of_the_user_are_added_to_ours(vllm: Any) -> None:
    arguments = made(
        kv_cache_tokens=64, vllm={"kv_cache_dtype": "fp8", "block_size": 32, "disable_log_stats": False}
    ).arguments
    assert (arguments["kv_cache_dtype"], arguments["block_size"]) == ("fp8", 32) and not arguments["disable_log_stats"]
    assert arguments["load_format"] == "dummy" and arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["device_ids"] is None and arguments["distributed_executor_backend"] is None


def test_ranks_that_share_a_gpu(vllm: Any) -> None:
    shared = made(tensor_parallel_size=2, devices=(1, 1)).arguments
    assert shared["device_ids"] == [1, 1] and os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert shared["distributed_executor_backend"] == "mp" and shared["disable_custom_all_reduce"]
    apart = made(tensor_parallel_size=2, devices=(0, 1)).arguments
    assert apart["device_ids"] is None and not apart["disable_custom_all_reduce"]


def test_a_stage_has_the_cache_of_its_layers(vllm: Any) -> None:
    whole, half = (
        made(kv_cache_tokens=64, vllm={"pipeline_parallel_size": stages}).cache_config.kv_cache_memory_bytes
        for stages in (1, 2)
    )
    assert whole == 2 * half  # of two layers
    os.environ["VLLM_PP_LAYER_PARTITION"] = "1,1"
    with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION moves layers between stages"):
        made(vllm={"pipeline_parallel_size": 2})


def test_what_vllm_does_not_know_or_refuses_is_a_config_error(vllm: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.32\.1 has no argument 'kv_cache_type' .* did you mean 'kv_cache_dtype'"
    ):
        made(vllm={"kv_cache_type": "fp8"})
    with pytest.raises(
        ConfigError, match=r"refuses its arguments \(kv_cache_dtype='fp3'\): kv_cache_dtype: Input should"
    ):
        made(vllm={"kv_cache_dtype": "fp3"})


def test_room_for_adapters(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterConfig(slots=3, rank=9, targets=("q_proj", "o_proj"))
    with pytest.raises(ConfigError, match="computes adapters in 16 bits only"):
        made(adapters=adapters)
    arguments = made("bfloat16", adapters=adapters).arguments
    assert arguments["enable_lora"] and (arguments["max_loras"], arguments["max_lora_rank"]) == (3, 16)
    assert arguments["lora_target_modules"] == ["o_proj", "q_proj"] and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    everything = made("bfloat16", adapters=AdapterConfig(rank=1)).arguments["lora_target_modules"]
    assert everything == list(targets(tensors(CONFIG)))
    monkeypatch.setattr(compat, "inspect_models_here", lambda: None)
    vllm.device_type = "cpu"
    assert made(adapters=adapters).arguments["max_loras"] == 4  # one stays zero, for requests without an adapter
    with pytest.raises(ConfigError, match=r"adapters\.targets has qkv_proj; this model has .*q_proj"):
        made(adapters=AdapterConfig(targets=("qkv_proj",)))
    with pytest.raises(ConfigError, match="cannot compute experts while adapters are enabled"):
        made(config=tiny_config("mixtral", head_dim=32), adapters=adapters)
    with pytest.raises(ConfigError, match="sequence classification have not been tried"):
        made(num_labels=2, adapters=adapters)


def test_determinism_is_vllms_batch_invariant_mode_or_an_error(vllm: Any) -> None:
    made()
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    made(deterministic=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    vllm.device_type = "cpu"
    with pytest.raises(ConfigError, match=r"compute capability 8\.0; here vLLM computes on cpu"):
        made(deterministic=True)
