"""Which vLLM this is, and the few places where versions differ."""

from __future__ import annotations

import logging
import os
from typing import Any

from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

TESTED = ("0.26", "0.32")
"""Releases that the conformance suite has run against."""

SECOND_RUNNER = ("0.26",)
"""Releases whose second model runner we know; of others, the first one is used."""

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_NEEDED = {
    "vllm.v1.engine.async_llm": ("AsyncLLM",),
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.v1.sample.sampler": ("Sampler",),
    "vllm.logprobs": ("FlatLogprobs",),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.outputs": ("LogprobsLists",),
    "vllm.v1.engine.exceptions": ("EngineDeadError",),
}
_METHODS = ("generate", "pause_generation", "resume_generation", "reset_prefix_cache", "collective_rpc", "shutdown")


def check() -> str:
    """The version of the vLLM that is installed. Raises `ConfigError` that names what is missing."""
    import importlib

    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported here ({error}); make an environment for it with `slipstream setup vllm --cpu`, or "
            "name the interpreter that has it with python=…"
        ) from None
    version = str(vllm.__version__)
    for module, names in _NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"vLLM {version} has no {module} ({error}); {_advice()}") from None
        for name in names:
            if not hasattr(found, name):
                raise ConfigError(f"vLLM {version} has no {module}.{name}; {_advice()}")
    from vllm.v1.engine.async_llm import AsyncLLM

    if missing := [name for name in _METHODS if not hasattr(AsyncLLM, name)]:
        raise ConfigError(f"AsyncLLM of vLLM {version} has no {', '.join(missing)}; {_advice()}")
    if not version.startswith(TESTED):
        log.warning("vLLM %s was never tested with Slipstream; %s", version, _advice())
    return version


def _advice() -> str:
    return f"tested are {_releases(TESTED)}"


def _releases(versions: tuple[str, ...]) -> str:
    return " and ".join(f"{version}.x" for version in versions)


def is_cpu() -> bool:
    """Whether this vLLM computes on CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def choose_runner(version: str) -> dict[str, str]:
    """Variables for vLLM's environment, unless they have values already. By itself it takes the second model runner for most
    models, on a GPU."""
    if version.startswith(SECOND_RUNNER) and not is_cpu():
        return {}
    if os.environ.get(_RUNNER, "0") not in ("", "0"):
        known = _releases(SECOND_RUNNER)
        raise ConfigError(f"{_RUNNER} asks for a model runner of vLLM {version} that we know of {known} only, on a GPU")
    return {_RUNNER: "0"}


def has_second_runner(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


async def stop_stepping(llm: Any) -> None:
    """Returns between two steps; what runs is kept, and so is the KV cache. Without the pause of 20 ms that
    `AsyncLLM.pause_generation` makes for the looks of it, where there is a way round it."""
    core = llm.engine_core
    if hasattr(core, "pause_scheduler_async"):
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
    else:
        await llm.pause_generation(mode="keep", clear_cache=False)


async def go_on_stepping(llm: Any) -> None:
    await llm.resume_generation()


def token_prompt(tokens: tuple[int, ...], salt: str) -> dict[str, Any]:
    """With a salt, a prompt finds nothing in the prefix cache that was put there under another one."""
    return {"prompt_token_ids": list(tokens), "cache_salt": salt}


def external_id(internal: str) -> str:
    """Of a request, from the id that workers know it by: vLLM appends random characters."""
    return internal.partition("-")[0]
