"""A small API for local trainers: generate, announce new weights, pause and resume."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field
from pydantic_core import to_json

from slipstream.errors import RequestError
from slipstream.http import vllm_dialect
from slipstream.http.errors import JSON
from slipstream.http.generation import (
    NumTokens,
    Prompts,
    SamplingFields,
    collect_completions,
    list_prompts,
    make_requests,
)
from slipstream.http.limits import LimitedRoute, cancel_on_disconnect
from slipstream.http.openai_choices import finite
from slipstream.http.request_models import JsonModel
from slipstream.http.state import CurrentFront, CurrentTicket

router = APIRouter(tags=["Local trainers"], route_class=LimitedRoute)
OK = {"status": "ok"}


class GenerateRequest(SamplingFields):
    prompt: Prompts
    max_tokens: NumTokens = 64
    logprobs: bool = False


class NotifyUpdate(JsonModel):
    update_count: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """The trainer's own count. An update that is loaded already is not loaded again."""
    trainer_rank: Annotated[int, Field(ge=0)] = 0
    """Rank in a trainer of several processes. Only rank 0 triggers an update."""
    timestamp: float | None = None
    path: str = ""
    """The checkpoint, relative to the configured directory; empty is that directory."""
    partial: bool = False
    """Keep the engines' tensors that are not in the checkpoint."""


class SleepLevel(JsonModel):
    level: Annotated[int, Field(ge=1, le=2)] = 1


@router.post("/generate")
@cancel_on_disconnect
async def generate(request: Request, front: CurrentFront, ticket: CurrentTicket, body: GenerateRequest) -> Response:
    """Complete prompts. The answer has one list per field, in the order of the prompts and their samples."""
    adapter = await front.adapter_of(body.model)
    prompts, answer_id = list_prompts(body.prompt), body.answer_id("gen")
    params = body.sampling_params(body.max_tokens, 0)
    requests = make_requests(prompts, params, answer_id, body.priority, adapter=adapter)
    completions = await collect_completions(front, ticket, answer_id, requests)
    answer: dict[str, Any] = {
        "text": [c.text for c in completions],
        "prompt": [prompts[c.prompt_index] for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "policy_versions": [c.version for c in completions],
    }
    if body.logprobs:
        answer["logprobs"] = [[finite(logprob) for logprob in c.logprobs] for c in completions]
    if body.return_token_ids:
        answer["prompt_token_ids"] = [c.prompt_token_ids for c in completions]
        answer["token_ids"] = [c.token_ids for c in completions]
    return Response(to_json(answer), media_type=JSON)


@router.get("/bridge/info")
async def info(front: CurrentFront) -> dict[str, Any]:
    """Describe the fleet, and where it takes checkpoints from."""
    status = await front.fleet.status()
    engines = [engine.info for engine in status.present]
    return {
        "enabled": front.config.weights != "",
        "shared_weights": False,
        "weights": front.local_weights,
        "update_count": front.updates.num_committed,
        "last_update_time": front.updates.last_time or None,
        "model_name": front.model_name,
        "device": ", ".join(sorted({e.kind for e in engines})),
        "policy_version": status.version,
        "engines": [{"name": e.info.name, "state": e.state, "version": e.info.version} for e in status.engines],
    }


@router.get("/bridge/state_dict_info")
async def state_dict_info(front: CurrentFront) -> dict[str, Any]:
    """Return the shape and dtype of each tensor that a checkpoint must hold."""
    first, *_ = (await front.parameter_mapping())["engines"].values()
    return {name: {"shape": row["shape"], "dtype": row["dtype"]} for name, row in first["parameters"].items()}


@router.get("/bridge/parameters")
async def parameters(front: CurrentFront) -> dict[str, Any]:
    """Return where each tensor of a checkpoint lies in each engine."""
    return await front.parameter_mapping()


@router.post("/bridge/notify_update")
async def notify_update(
    front: CurrentFront, body: Annotated[NotifyUpdate, Body(default_factory=NotifyUpdate)]
) -> dict[str, Any]:
    """Load a checkpoint into every engine as the next version; answer when the engines serve it."""
    updates, count = front.updates, body.update_count
    if body.trainer_rank != 0 or (count is not None and count <= updates.last_update_count):
        return {**OK, "loaded": False, "policy_version": (await front.fleet.status()).version}
    report = await updates.publish([body.path], body.partial)
    updates.last_update_count = count if count is not None else updates.last_update_count
    return {
        **OK,
        "loaded": True,
        "policy_version": report.version,
        "num_bytes": report.num_bytes,
        "seconds": report.total_seconds,
        "pause_seconds": report.pause_seconds,
    }


@router.post("/bridge/pause")
async def pause(front: CurrentFront) -> dict[str, str]:
    """Pause all engines; running requests continue after the pause."""
    await vllm_dialect.pause_fleet(front, "keep")
    return OK


@router.post("/bridge/resume")
async def resume(front: CurrentFront) -> dict[str, str]:
    """Resume all engines."""
    await vllm_dialect.resume(front)
    return OK


@router.post("/bridge/sleep")
async def sleep(front: CurrentFront, body: Annotated[SleepLevel, Body(default_factory=SleepLevel)]) -> dict[str, str]:
    """Release device memory; running requests continue after `/bridge/wake_up`."""
    await vllm_dialect.sleep_fleet(front, body.level, "keep")
    return OK


@router.post("/bridge/wake_up")
async def wake_up(front: CurrentFront) -> dict[str, str]:
    """Take device memory back."""
    reports = await front.fleet.wake()
    if asleep := sorted(name for name, report in reports.items() if report.asleep):
        raise RequestError(f"{', '.join(asleep)} dropped the weights (level 2); only an update brings them back")
    return OK
