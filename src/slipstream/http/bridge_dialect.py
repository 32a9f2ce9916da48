"""A plain interface for local trainers: generate, say that new weights lie there, pause and go on."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Annotated, Any

from slipstream.errors import NotReady, RequestError
from slipstream.http import vllm_dialect
from slipstream.http.answers import Answer
from slipstream.http.choices import finite
from slipstream.http.front import Front
from slipstream.http.sampling import Prompts, Sampled, Tokens, completions, prompts_of, requests
from slipstream.http.shapes import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateBody(Sampled):
    prompt: Prompts
    max_tokens: Tokens = 64
    logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class NotifyBody:
    update_count: Annotated[int, Limits(0, 2**63 - 1)] | None = None
    """The trainer's own count: an update that was loaded is not loaded again."""
    trainer_rank: Annotated[int, Limits(0)] = 0
    """Of a trainer of several processes the first one's word counts."""
    timestamp: float | None = None
    path: str = ""
    """The checkpoint, under the directory that the front may read; empty is that directory."""
    partial: bool = False
    """It holds a part of the tensors, and the others stay as they are."""


@dataclass(frozen=True, kw_only=True)
class LevelBody:
    level: Annotated[int, Limits(1, 2)] = 1


async def generate(front: Front, body: GenerateBody) -> Answer:
    front.check_model(body.model)
    name = body.name("gen")
    prompts = prompts_of(body.prompt)
    asked = requests(prompts, body.sampling(body.max_tokens, 0), name, body.priority)
    async with contextlib.aclosing(front.flights.watch(name, completions(front.fleet, asked))) as arriving:
        found = sorted([c async for c in arriving], key=lambda c: (c.prompt_index, c.sample_index))
    front.metrics.generated(found)
    answer: dict[str, Any] = {
        "text": [c.text for c in found],
        "prompt": [prompts[c.prompt_index] for c in found],
        "finish_reasons": [c.finish_reason for c in found],
        "policy_versions": [c.version for c in found],
    }
    if body.logprobs:
        answer["logprobs"] = [[finite(value) for value in c.logprobs] for c in found]
    if body.return_token_ids:
        answer["prompt_token_ids"] = [list(c.prompt_token_ids) for c in found]
        answer["token_ids"] = [list(c.token_ids) for c in found]
    return answer


async def info(front: Front) -> Answer:
    status = await front.status()
    engines = [engine.info for engine in status.present]
    if front.run_dir is not None and engines and not front.is_mapped(engines):
        try:
            await front.map()  # trainers look for the file when they have asked this
        except (NotReady, OSError) as error:
            log.warning("the mapping file could not be written: %s", error)
    return {
        "enabled": front.config.weights != "",
        "shared_weights": False,
        "update_count": front.weights.count,
        "last_update_time": front.weights.last_time or None,
        "model_name": front.name,
        "device": ", ".join(sorted({e.kind for e in engines})),
        "policy_version": status.version,
        "engines": [{"name": e.info.name, "state": e.state, "version": e.info.version} for e in status.engines],
    }


async def state_dict_info(front: Front) -> Answer:
    """What a checkpoint must hold."""
    first, *_ = (await front.map())["engines"].values()
    return {name: {"shape": row["shape"], "dtype": row["dtype"]} for name, row in first["parameters"].items()}


async def parameters(front: Front) -> Answer:
    return await front.map()


async def notify_update(front: Front, body: NotifyBody) -> Answer:
    """Loads the checkpoint into every engine as the next version; answers when it serves."""
    count = body.update_count
    if body.trainer_rank != 0 or (count is not None and count <= front.weights.notified):
        return {"status": "ok", "loaded": False, "policy_version": (await front.status()).version}
    report = await front.weights.publish([body.path], body.partial)
    front.weights.notified = count if count is not None else front.weights.notified
    return {
        "status": "ok",
        "loaded": True,
        "policy_version": report.version,
        "num_bytes": report.num_bytes,
        "seconds": report.total_seconds,
        "pause_seconds": report.pause_seconds,
    }


async def pause(front: Front) -> Answer:
    await vllm_dialect.pause_fleet(front, "keep")
    return {"status": "ok"}


async def resume(front: Front) -> Answer:
    await vllm_dialect.resume(front)
    return {"status": "ok"}


async def sleep(front: Front, body: LevelBody) -> Answer:
    await vllm_dialect.sleep_fleet(front, body.level, "keep")
    return {"status": "ok"}


async def wake_up(front: Front) -> Answer:
    reports = await front.fleet.wake()
    if asleep := sorted(name for name, report in reports.items() if report.asleep):
        raise RequestError(f"{', '.join(asleep)} dropped the weights (level 2), and only an update brings them back")
    return {"status": "ok"}
