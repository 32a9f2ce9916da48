"""The installed vLLM: its version, whether it has what we need, and the few places where releases differ."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

TESTED = ("0.26", "0.32")
"""Releases that pass the conformance suite."""

V2_RUNNER_RELEASES = ("0.26",)
"""Releases whose V2 model runner we support; with others the V1 runner is used."""

OWNER_VARIABLE = "SLIPSTREAM_VLLM_OWNER"
"""Environment variable with the pid of the process that hosts the engine."""
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_NEEDED = {
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.v1.sample.sampler": "Sampler",
    "vllm.logprobs": "FlatLogprobs",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.outputs": "LogprobsLists",
    "vllm.v1.engine.exceptions": "EngineDeadError",
}
_METHODS = (
    "generate",
    "encode",
    "pause_generation",
    "resume_generation",
    "reset_prefix_cache",
    "collective_rpc",
    "shutdown",
)


def check() -> str:
    """Return the version of the installed vLLM. Raise `ConfigError` naming what it lacks."""
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported here ({error}); make an environment for it with `slipstream setup vllm --cpu`, or "
            "name the interpreter that has it with python=…"
        ) from None
    version = str(vllm.__version__)
    advice = f"tested releases: {_releases(TESTED)}"
    for path, name in _NEEDED.items():
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            raise ConfigError(f"vLLM {version} has no {path} ({error}); {advice}") from None
        if not hasattr(module, name):
            raise ConfigError(f"vLLM {version} has no {path}.{name}; {advice}")
    from vllm.v1.engine.async_llm import AsyncLLM

    if missing := [name for name in _METHODS if not hasattr(AsyncLLM, name)]:
        raise ConfigError(f"AsyncLLM of vLLM {version} has no {', '.join(missing)}; {advice}")
    if not version.startswith(TESTED):
        log.warning("vLLM %s is untested with Slipstream; %s", version, advice)
    return version


def _releases(versions: tuple[str, ...]) -> str:
    return " and ".join(f"{version}.x" for version in versions)


def is_cpu() -> bool:
    """Return whether this vLLM computes on CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process. By default it imports itself once more in another one, which takes many
    seconds, so that CUDA is not initialized here."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def pin_norms() -> None:
    """In vLLM's batch-invariant mode, normalize every row alike. Its kernel that also adds the residual sums in another order
    from 256 tokens on (vllm-project/vllm#48271; mended after 0.26)."""
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        return
    from vllm.model_executor.layers import layernorm

    norm = layernorm.rms_norm_batch_invariant

    def add_then_norm(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        if residual is None:
            return norm(x, weight, eps)
        total = x + residual
        return norm(total, weight, eps), total

    layernorm.rms_norm_batch_invariant = add_then_norm


def choose_runner(version: str) -> dict[str, str]:
    """Return the environment variables that select the model runner. On a GPU, vLLM defaults to its V2 runner for most
    models."""
    if version.startswith(V2_RUNNER_RELEASES) and not is_cpu():
        return {}
    if os.environ.get(_RUNNER_VARIABLE, "0") not in ("", "0"):
        raise ConfigError(
            f"{_RUNNER_VARIABLE} selects the V2 model runner of vLLM {version}; Slipstream supports that of "
            f"{_releases(V2_RUNNER_RELEASES)} only, on a GPU. Unset it"
        )
    return {_RUNNER_VARIABLE: "0"}


async def stop_stepping(llm: Any) -> None:
    """Return between two steps; running requests and the KV cache are kept. Bypasses the 20 ms sleep of
    `AsyncLLM.pause_generation` where possible."""
    core = llm.engine_core
    if hasattr(core, "pause_scheduler_async"):
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
    else:
        await llm.pause_generation(mode="keep", clear_cache=False)


def lora_request(name: str, slot: int) -> Any:
    """Return what tells vLLM that a request computes with the adapter of a slot. vLLM requires the path, and does not read it:
    an adapter is there before its requests."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, slot, "in-memory")


def rename_mapper(model: Any) -> Any:
    """Return what maps names of a checkpoint to those of vLLM's modules, without fusing them; None if they are equal."""
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


def external_id(internal: str) -> str:
    """Return the id we gave a request, from the id that workers know it by: vLLM appends random characters."""
    return internal.partition("-")[0]
