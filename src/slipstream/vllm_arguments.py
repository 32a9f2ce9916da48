"""Which arguments of vLLM a user may pass, and which of our promises they touch.

One table decides for every argument of `vllm={…}`: it is ours to set, it is refused, or a promise is reported as not held. An
argument that is not in the table passes, and is reported as untested. `tools/vllm_arguments.py` writes the table of
docs/vllm.md from it, with the results of tests. Needs no vLLM."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slipstream.errors import ConfigError

Effect: TypeAlias = Literal["ours", "refused", "reported", "kept"]

PROMISES = {
    "spans": "every token carries the version of the weights that drew it",
    "seeds": "a seed draws the same tokens again, whatever else is in the batch",
    "versions": "no cached prefix of an older version is used",
    "logprobs": "logprobs are those that the trainer computes with the same weights",
    "weights": "an update takes effect whole or not at all, and can be verified",
}


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """What happens to an argument."""

    effect: Effect
    reason: str = ""
    """Why, or for an argument of ours: what to use instead."""
    promises: tuple[str, ...] = ()
    """Promises that it breaks."""
    harmless: tuple[Any, ...] = ()
    """Values that break nothing."""


def _ours(*names: str, use: str) -> dict[str, ArgumentRule]:
    return dict.fromkeys(names, ArgumentRule("ours", use))


def _refused(
    *names: str, why: str, promises: tuple[str, ...], harmless: tuple[Any, ...] = ()
) -> dict[str, ArgumentRule]:
    return dict.fromkeys(names, ArgumentRule("refused", why, promises, harmless))


def _reported(
    *names: str, why: str, promises: tuple[str, ...], harmless: tuple[Any, ...] = ()
) -> dict[str, ArgumentRule]:
    return dict.fromkeys(names, ArgumentRule("reported", why, promises, harmless))


RULES: dict[str, ArgumentRule] = {
    **_ours(
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        use="use the setting of VllmConfig with this name",
    ),
    **_ours("model", "model_weights", "hf_config_path", use="name the model to launch"),
    **_ours("revision", "code_revision", use="launch name@revision"),
    **_ours("hf_token", "download_dir", use="set HF_TOKEN and HF_HOME"),
    **_ours("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", use="Slipstream tokenizes"),
    **_ours("kv_cache_memory_bytes", "num_gpu_blocks_override", use="use kv_cache_tokens of VllmConfig"),
    **_ours("device_ids", use="use devices of launch"),
    **_ours("load_format", use="the model's weights are loaded if it has any, and else the first sync brings them"),
    **_ours("worker_extension_cls", "worker_cls", "scheduler_cls", use="Slipstream's own run in vLLM"),
    **_ours(
        "logprobs_mode", "max_logprobs", use="completions carry both logprobs, and SamplingParams has top_logprobs"
    ),
    **_ours("scheduling_policy", use="requests have a priority"),
    **_ours("async_scheduling", use="Slipstream chooses it by platform"),
    **_ours("enable_sleep_mode", "enable_cumem_allocator", use="engines can sleep unless share_weights is set"),
    **_ours("weight_transfer_config", use="bridge.sync sends weights"),
    **_ours("spec_method", "spec_model", "spec_tokens", use="use speculative_config"),
    **_ours(
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        use="launch several engines",
    ),
    **_ours(
        "nnodes", "node_rank", "master_addr", "master_port", use="an engine is on one machine; launch several engines"
    ),
    **_ours(
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "lora_dtype",
        "lora_target_modules",
        "default_mm_loras",
        use="use adapters of VllmConfig",
    ),
    "enable_lora": ArgumentRule("ours", "use adapters of VllmConfig", harmless=(False,)),
    **_ours(
        "enable_return_routed_experts",
        "aux_output_config",
        use="vLLM returns experts from its V2 model runner only, and Slipstream does not pass them on; routing replay needs "
        "the embedded engine",
    ),
    **_ours(
        *("runner", "convert", "pooler_config", "diffusion_config"),
        use="language models generate, token by token, and models for sequence classification score",
    ),
    **_refused(
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_group_size",
        "offload_params",
        why="parameters that leave the GPU cannot be written there",
        promises=("weights",),
        harmless=(0, None),
    ),
    **_refused(
        "enable_eplb",
        "eplb_config",
        "enable_elastic_ep",
        why="experts would move between ranks, and updates would not follow them",
        promises=("weights",),
        harmless=(False, None),
    ),
    **_refused(
        "prefill_context_parallel_size",
        why="which rank holds which weights is not known for it",
        promises=("weights",),
        harmless=(1,),
    ),
    **_refused(
        "distributed_executor_backend",
        why="workers must be processes of this machine",
        promises=("weights",),
        harmless=("mp", "uni", None),
    ),
    **_refused(
        "enable_batch_sharded_sampling",
        why="it replaces the sampler, and with it seeds and both logprobs",
        promises=("seeds", "logprobs"),
        harmless=(False,),
    ),
    **_reported(
        "quantization",
        "quantization_config",
        why="weights are rounded to fewer bits than the trainer's, and cannot be read back",
        promises=("logprobs", "weights"),
        harmless=(None,),
    ),
    **_reported(
        "kv_cache_dtype",
        "calculate_kv_scales",
        why="keys and values are rounded to fewer bits",
        promises=("logprobs",),
        harmless=("auto", "bfloat16", False),
    ),
    **_reported(
        "hf_overrides",
        why="the model may compute something else than the trainer's",
        promises=("logprobs",),
        harmless=(None,),
    ),
    **_reported(
        "kv_transfer_config",
        "kv_offloading_size",
        why="keys and values outlive the engine's own cache",
        promises=("versions",),
        harmless=(None,),
    ),
    **_reported(
        "speculative_config",
        why="draws also depend on how many tokens were proposed",
        promises=("seeds",),
        harmless=(None,),
    ),
    **dict.fromkeys(
        (
            "attention_backend",
            "block_size",
            "compilation_config",
            "cudagraph_capture_sizes",
            "disable_cascade_attn",
            "disable_custom_all_reduce",
            "disable_log_stats",
            "enable_chunked_prefill",
            "enable_expert_parallel",
            "long_prefill_token_threshold",
            "max_cudagraph_capture_size",
            "pipeline_parallel_size",
            "prefix_caching_hash_algo",
            "seed",
            "stream_interval",
            "trust_remote_code",
        ),
        ArgumentRule("kept"),
    ),
}

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with; adapters of all ranks up to it are served."""

DRAFT_MODEL = "draft_model"
"""The method of speculative decoding in which a smaller model proposes tokens."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an argument that is ours, or that breaks a promise which cannot be given up."""
    for name, value in arguments.items():
        rule = RULES.get(name)
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"vllm.{name} is {value!r:.80}; an engine is another process, so it must be plain values as in JSON"
            ) from None
        if rule is None or value in rule.harmless:
            continue
        if rule.effect == "ours":
            raise ConfigError(f"vllm.{name} is not a user's to set: {rule.reason}")
        if rule.effect == "refused":
            raise ConfigError(f"vllm.{name} = {value!r:.80} is refused: {rule.reason} ({_broken(rule)})")
        if name == "speculative_config":
            _check_speculation(value)
    stages = arguments.get("pipeline_parallel_size", 1)
    if type(stages) is not int or stages < 1:
        raise ConfigError(f"vllm.pipeline_parallel_size must be a positive integer, got {stages!r}")
    if stages > 1 and draft_model(arguments):
        raise ConfigError("vllm.speculative_config names a draft model, which needs an engine of one pipeline stage")


def _check_speculation(value: Any) -> None:
    method, model = (value.get("method"), value.get("model")) if isinstance(value, Mapping) else (None, None)
    if not (method == "ngram" and not model) and not (method == DRAFT_MODEL and isinstance(model, str) and model):
        raise ConfigError(
            f"vllm.speculative_config = {value!r:.120} is refused: syncs would not reach what it proposes with. Use method = "
            "'ngram', which has no weights, or 'draft_model' with a directory or a name as model, which "
            "bridge.sync(draft=…) updates"
        )


def draft_model(arguments: Mapping[str, Any]) -> str:
    """Return the directory or the name of the draft model; empty if there is none."""
    value = arguments.get("speculative_config")
    return str(value.get("model", "")) if isinstance(value, Mapping) and value.get("method") == DRAFT_MODEL else ""


def check_known(arguments: Collection[str], known: Collection[str], version: str = "") -> None:
    """Raise `ConfigError` for an argument that this vLLM does not have, with the nearest one that it has."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see AsyncEngineArgs in its documentation"
            raise ConfigError(f"vLLM{f' {version}' if version else ''} has no argument {name!r} (vllm.{name}); {hint}")


def not_held(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the promises that an engine with these arguments does not hold, each with the reason."""
    found = []
    for name, value in sorted(arguments.items()):
        rule = RULES.get(name)
        if rule is None:
            found.append(f"promises for certain: {name} was never tested")
        elif rule.effect == "reported" and value not in rule.harmless:
            found.append(f"{' and '.join(rule.promises)}: {rule.reason} ({name})")
    return tuple(found)


def _broken(rule: ArgumentRule) -> str:
    return "; ".join(f"{name}: {PROMISES[name]}" for name in rule.promises)
