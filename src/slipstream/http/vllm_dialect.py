"""vLLM's calls for RL, for a whole fleet at once: pause, sleep, prefix cache. Answers are shaped as vLLM's.

A call acts on every engine or, where one cannot, on none: what others have done already is undone before the error is
answered. All may be repeated."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Literal

from slipstream.errors import NotReady, SlipstreamError
from slipstream.http.answers import Answer
from slipstream.http.front import Front
from slipstream.http.shapes import Limits
from slipstream.types import MemoryTag

Mode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, kw_only=True)
class PauseQuery:
    mode: Mode = "abort"
    """Of the requests that came over HTTP and run: end them, let them finish first, or let them go on after `/resume`."""
    clear_cache: bool = True
    """Nothing that an older version has computed is ever used, cleared or not."""


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
    reset_external: bool = False


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
    was_paused = await _is_paused(front)
    await _settle(front, mode, was_paused or await _is_asleep(front))
    try:
        await front.fleet.pause()
    except SlipstreamError:
        if not was_paused:
            with contextlib.suppress(SlipstreamError):
                await front.fleet.resume()
        raise
    if mode == "abort":  # what came between the two
        await front.flights.abort()


async def resume(front: Front) -> Answer:
    await front.fleet.resume()
    front.dozes = False
    return {"status": "resumed"}


async def is_paused(front: Front) -> Answer:
    return {"is_paused": await _is_paused(front)}


async def abort_requests(front: Front, body: AbortBody) -> Answer:
    return {"status": "aborted", "aborted": await front.flights.abort(body.request_ids or None)}


async def sleep(front: Front, query: SleepQuery) -> Answer:
    if query.level == 0:  # a pause that ends with `/wake_up`
        front.dozes = front.dozes or not await _is_paused(front)
        await pause_fleet(front, query.mode)
    else:
        await sleep_fleet(front, query.level, query.mode)
    return {"status": "sleeping", "level": query.level}


async def sleep_fleet(front: Front, level: int, mode: Mode) -> None:
    was_asleep = await _is_asleep(front)
    await _settle(front, mode, was_asleep or await _is_paused(front))
    try:
        await front.fleet.sleep(level)
    except SlipstreamError:
        if not was_asleep:
            with contextlib.suppress(SlipstreamError):
                await front.fleet.wake()
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
    return {"is_sleeping": front.dozes or await _is_asleep(front)}


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


async def _is_paused(front: Front) -> bool:
    return any(e.is_paused for e in (await front.status()).engines if e.state != "lost")


async def _is_asleep(front: Front) -> bool:
    return any(e.state == "asleep" for e in (await front.status()).engines)


# --- what the server is -----------------------------------------------------------------------------------------------


async def world_size(front: Front, query: WorldQuery) -> Answer:
    engines = [e.info for e in (await front.status()).engines if e.state != "lost"]
    if not engines:
        raise NotReady("no engine has registered yet")
    return {"world_size": sum(e.num_ranks for e in engines) if query.include_dp else engines[0].num_ranks}


async def server_info(front: Front, query: InfoQuery) -> Answer:
    """The parts of vLLM's config that clients look at. No weight transfer is configured: NCCL ends at the engines, and a
    trainer reaches those with `slipstream.connect`."""
    info, engines = await front.info(), (await front.status()).engines
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
            "data_parallel_size": sum(e.state != "lost" for e in engines),
        },
        "weight_transfer_config": None,
    }
    shown = config if query.config_format == "json" else str(config)
    return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}
