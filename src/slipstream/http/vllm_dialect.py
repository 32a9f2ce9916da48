"""vLLM's calls for RL, for a whole fleet at once: pause, sleep, prefix cache. Answers are shaped as vLLM's.

What stops engines acts on every one or, where one cannot, on none: those that it has stopped go on before the error is
answered. (Weights that were dropped, by sleep at level 2, only an update brings back.) What lets them go on is not undone:
nobody is stopped because another hangs. All may be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from slipstream.errors import SlipstreamError
from slipstream.http.answers import Answer
from slipstream.http.front import Front
from slipstream.http.shapes import Limits
from slipstream.types import EngineStatus, MemoryTag

Mode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, kw_only=True)
class PauseQuery:
    mode: Mode = "abort"
    """Of the requests that came over HTTP and run: end them, let them finish first, or let them go on after `/resume`."""
    clear_cache: bool = True
    """Changes nothing: what an older version has computed is never used. `/reset_prefix_cache` empties it all the same."""


@dataclass(frozen=True, kw_only=True)
class SleepQuery:
    level: Annotated[int, Limits(0, 2)] = 1
    mode: Mode = "abort"


@dataclass(frozen=True, kw_only=True)
class WakeQuery:
    tags: list[Literal["weights", "kv_cache"]] | None = None


@dataclass(frozen=True, kw_only=True)
class CacheQuery:
    reset_running_requests: bool = False
    """Not needed for the cache to be reset, and changes nothing: those that run go on with what they have computed."""
    reset_external: bool = False
    """There is no cache outside of the engines."""


@dataclass(frozen=True, kw_only=True)
class WorldQuery:
    include_dp: bool = True


@dataclass(frozen=True, kw_only=True)
class InfoQuery:
    config_format: Literal["text", "json"] = "text"


@dataclass(frozen=True, kw_only=True)
class AbortBody:
    request_ids: list[str] | None = None


# --- pause and sleep --------------------------------------------------------------------------------------------------


async def pause(front: Front, query: PauseQuery) -> Answer:
    await pause_fleet(front, query.mode)
    return {"status": "paused"}


async def pause_fleet(front: Front, mode: Mode) -> None:
    engines = await _engines(front)
    await _settle(front, mode, bool(_paused(engines) | _asleep(engines)))
    try:
        await front.fleet.pause()
    except SlipstreamError:
        await _undo(front.fleet.resume, engines.keys() - _paused(engines))
        raise
    if mode == "abort":  # what came between the two
        await front.flights.abort()


async def resume(front: Front) -> Answer:
    await front.fleet.resume()
    front.dozes = False
    return {"status": "resumed"}


async def is_paused(front: Front) -> Answer:
    return {"is_paused": bool(_paused(await _engines(front)))}


async def abort_requests(front: Front, body: AbortBody) -> Answer:
    return {"status": "aborted", "aborted": await front.flights.abort(body.request_ids or None)}


async def sleep(front: Front, query: SleepQuery) -> Answer:
    if query.level == 0:  # a pause that ends with `/wake_up`
        front.dozes = front.dozes or not _paused(await _engines(front))
        await pause_fleet(front, query.mode)
    else:
        await sleep_fleet(front, query.level, query.mode)
    return {"status": "sleeping", "level": query.level}


async def sleep_fleet(front: Front, level: int, mode: Mode) -> None:
    engines = await _engines(front)
    await _settle(front, mode, bool(_paused(engines) | _asleep(engines)))
    try:
        await front.fleet.sleep(level)
    except SlipstreamError:
        await _undo(front.fleet.wake, engines.keys() - _asleep(engines))
        raise


async def wake_up(front: Front, query: WakeQuery) -> Answer:
    tags: list[MemoryTag] | None = list(query.tags) if query.tags else None
    reports = await front.fleet.wake(tags)
    if tags is None and front.dozes:
        await front.fleet.resume()
        front.dozes = False
    asleep = any(report.asleep for report in reports.values())
    return {"status": "sleeping" if asleep else "awake", "tags": tags}


async def is_sleeping(front: Front) -> Answer:
    return {"is_sleeping": front.dozes or bool(_asleep(await _engines(front)))}


async def reset_prefix_cache(front: Front, query: CacheQuery) -> Answer:
    """Those that run keep theirs, or compute it anew. Not needed after an update."""
    await front.fleet.forget_prefixes()
    return {"success": True}


async def _settle(front: Front, mode: Mode, is_held: bool) -> None:
    """What runs on engines that are held up already would never end by itself."""
    if mode == "abort":
        await front.flights.abort()
    elif mode == "wait" and not is_held:
        await front.flights.drain()


async def _undo(call: Callable[..., Awaitable[Any]], names: Collection[str]) -> None:
    """Engine by engine: who does not answer keeps nobody from it."""
    await asyncio.gather(*(call(engine=name) for name in sorted(names)), return_exceptions=True)


async def _engines(front: Front) -> dict[str, EngineStatus]:
    return {engine.info.name: engine for engine in (await front.status()).present}


def _paused(engines: Mapping[str, EngineStatus]) -> set[str]:
    return {name for name, engine in engines.items() if engine.is_paused}


def _asleep(engines: Mapping[str, EngineStatus]) -> set[str]:
    return {name for name, engine in engines.items() if engine.state == "asleep"}


# --- what the server is -----------------------------------------------------------------------------------------------


async def world_size(front: Front, query: WorldQuery) -> Answer:
    status = await front.status()
    ranks = [engine.info.num_ranks for engine in status.present]
    if not ranks:
        raise status.nobody("to bring weights to")
    return {"world_size": sum(ranks) if query.include_dp else ranks[0]}


async def server_info(front: Front, query: InfoQuery) -> Answer:
    """The parts of vLLM's config that clients look at. No weight transfer is configured: NCCL ends at the engines, and a
    trainer reaches those with `slipstream.connect`."""
    info, status = await front.info(), await front.status()
    config = {
        "model_config": {
            "model": front.name,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": True,
        },
        "parallel_config": {
            "tensor_parallel_size": info.num_ranks,
            "data_parallel_size": len(status.present),
        },
        "weight_transfer_config": None,
    }
    shown = config if query.config_format == "json" else str(config)
    return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}
