"""vLLM's RL endpoints for a whole fleet: pause, sleep, prefix cache, server info. Answers have vLLM's format.

Pause and sleep act on every engine or on none: if one fails, the others are resumed before the error is returned. (Weights
dropped by sleep level 2 come back only with an update.) Resume and wake-up are not undone: one engine that hangs must not
stop the others. All endpoints may be called repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query

from slipstream.errors import SlipstreamError
from slipstream.http.limits import LimitedRoute
from slipstream.http.request_models import JsonModel
from slipstream.http.state import CurrentFront, Front
from slipstream.types import EngineStatus, MemoryTag

router = APIRouter(tags=["vLLM"], route_class=LimitedRoute)

PauseMode = Literal["abort", "wait", "keep"]
"""What to do with running requests that came over HTTP: abort them, wait for them, or keep them until the engines resume."""


class AbortRequests(JsonModel):
    request_ids: list[str] | None = None
    """Ids of answers; all requests that came over HTTP by default."""


@router.post("/pause")
async def pause(front: CurrentFront, mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
    """Pause all engines until `/resume`. Running requests that came over HTTP are aborted, awaited, or kept.

    `clear_cache` has no effect: KV entries of an older policy version are never used."""
    await pause_fleet(front, mode)
    return {"status": "paused"}


async def pause_fleet(front: Front, mode: PauseMode) -> None:
    engines = await _engines(front)
    await _settle(front, mode, engines)
    try:
        await front.fleet.pause()
    except SlipstreamError:
        await _undo(front.fleet.resume, engines.keys() - _paused(engines))
        raise
    if mode == "abort":  # requests that arrived in the meantime
        await front.in_flight.abort()


@router.post("/resume")
async def resume(front: CurrentFront) -> dict[str, str]:
    """Resume all engines."""
    await front.fleet.resume()
    front.is_paused_by_sleep = False
    return {"status": "resumed"}


@router.get("/is_paused")
@router.get("/bridge/is_paused")
async def is_paused(front: CurrentFront) -> dict[str, bool]:
    """Say whether any engine is paused."""
    return {"is_paused": bool(_paused(await _engines(front)))}


@router.post("/abort_requests")
async def abort_requests(
    front: CurrentFront, body: Annotated[AbortRequests, Body(default_factory=AbortRequests)]
) -> dict[str, Any]:
    """Abort generations that came over HTTP."""
    return {"status": "aborted", "aborted": await front.in_flight.abort(body.request_ids or None)}


@router.post("/sleep")
async def sleep(
    front: CurrentFront, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort"
) -> dict[str, Any]:
    """Release device memory. Level 0 is a pause that ends with `/wake_up`."""
    if level == 0:
        front.is_paused_by_sleep = front.is_paused_by_sleep or not _paused(await _engines(front))
        await pause_fleet(front, mode)
    else:
        await sleep_fleet(front, level, mode)
    return {"status": "sleeping", "level": level}


async def sleep_fleet(front: Front, level: int, mode: PauseMode) -> None:
    engines = await _engines(front)
    await _settle(front, mode, engines)
    try:
        await front.fleet.sleep(level)
    except SlipstreamError:
        await _undo(front.fleet.wake, engines.keys() - _asleep(engines))
        raise


@router.post("/wake_up")
async def wake_up(front: CurrentFront, tags: Annotated[list[MemoryTag] | None, Query()] = None) -> dict[str, Any]:
    """Take device memory back, all of it or that of the given tags."""
    reports = await front.fleet.wake(tags)
    if tags is None and front.is_paused_by_sleep:
        await front.fleet.resume()
        front.is_paused_by_sleep = False
    is_asleep = any(report.asleep for report in reports.values())
    return {"status": "sleeping" if is_asleep else "awake", "tags": tags}


@router.get("/is_sleeping")
@router.get("/bridge/is_sleeping")
async def is_sleeping(front: CurrentFront) -> dict[str, bool]:
    """Say whether any engine is asleep."""
    return {"is_sleeping": front.is_paused_by_sleep or bool(_asleep(await _engines(front)))}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    front: CurrentFront, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Empty the prefix caches. Not needed after an update.

    The parameters have no effect: running requests keep what they have computed, and there is no cache outside the
    engines."""
    await front.fleet.reset_prefix_cache()
    return {"success": True}


@router.get("/get_world_size")
async def get_world_size(front: CurrentFront, include_dp: bool = True) -> dict[str, int]:
    """Count the ranks that hold weights, of all engines or of one. With `nccl_python` it is 1: the only other rank of a
    trainer's communicator is this server's."""
    if front.communicator.is_enabled:
        return {"world_size": 1}
    status = await front.fleet.status()
    ranks = [engine.info.num_ranks for engine in status.present]
    if not ranks:
        raise status.no_engines("to bring weights to")
    return {"world_size": sum(ranks) if include_dp else ranks[0]}


@router.get("/server_info")
async def server_info(front: CurrentFront, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
    """Return the settings of vLLM that its clients read. Weights over NCCL need `nccl_python`. Logprobs of sampled tokens and
    of the likeliest ones are those of `--logprobs-mode processed_logprobs`; those of prompts are the model's own, as vLLM's."""
    info, status = await front.engine_info(), await front.fleet.status()
    config = {
        "model_config": {
            "model": front.model_name,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": True,
        },
        "parallel_config": {"tensor_parallel_size": info.num_ranks, "data_parallel_size": len(status.present)},
        "weight_transfer_config": {"backend": "nccl"} if front.communicator.is_enabled else None,
    }
    is_json = config_format == "json"
    return {"vllm_config": config if is_json else str(config), "vllm_env": {}, "system_env": {}}


async def _settle(front: Front, mode: PauseMode, engines: Mapping[str, EngineStatus]) -> None:
    """Abort or await running requests. On engines that are paused or asleep already, waiting would never end."""
    if mode == "abort":
        await front.in_flight.abort()
    elif mode == "wait" and not (_paused(engines) or _asleep(engines)):
        await front.in_flight.drain()


async def _undo(call: Callable[..., Awaitable[Any]], names: Collection[str]) -> None:
    """Call each engine separately, so that one that does not answer cannot hold up the others."""
    await asyncio.gather(*(call(engine=name) for name in sorted(names)), return_exceptions=True)


async def _engines(front: Front) -> dict[str, EngineStatus]:
    return {engine.info.name: engine for engine in (await front.fleet.status()).present}


def _paused(engines: Mapping[str, EngineStatus]) -> set[str]:
    return {name for name, engine in engines.items() if engine.is_paused}


def _asleep(engines: Mapping[str, EngineStatus]) -> set[str]:
    return {name for name, engine in engines.items() if engine.state == "asleep"}
