"""Every call that the front answers, and the application that answers them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream.http import bridge_dialect as plain
from slipstream.http import metrics, openai, openapi
from slipstream.http import vllm_dialect as vllm
from slipstream.http import vllm_weights as weights
from slipstream.http.answers import Answer, HttpError, Reply, error_reply
from slipstream.http.exchange import Call, Exchange
from slipstream.http.front import Front
from slipstream.http.guard import Guard


async def health(front: Front) -> Answer:
    return {"status": "alive"}


async def ready(front: Front) -> Answer:
    status = await front.status()
    states = {engine.info.name: engine.state for engine in status.engines}
    if "ready" not in states.values():
        raise HttpError(503, f"no engine serves a committed policy: {states or 'none has registered'}", "not_ready")
    return {"status": "ready", "policy_version": status.version, "engines": states}


async def prometheus(front: Front) -> Answer:
    return Reply(front.metrics.text(await front.status(), len(front.flights)), media_type=metrics.MEDIA_TYPE)


async def description(front: Front) -> Answer:
    return openapi.description(CALLS)


CALLS: tuple[Call, ...] = (
    Call("GET", "/health", health, "The process is alive. Needs no token."),
    Call("GET", "/ready", ready, "An engine serves a committed policy; 503 until then."),
    Call("GET", "/metrics", prometheus, "For Prometheus.", answers="text/plain"),
    Call("GET", "/openapi.json", description, "This description."),
    Call("GET", "/v1/models", openai.models, "The model that the fleet serves."),
    Call(
        "POST", "/v1/completions", openai.complete, "Completions of prompts.", openai.CompletionBody, is_given_up=True
    ),
    Call("POST", "/v1/chat/completions", openai.chat, "The next message of a chat.", openai.ChatBody, is_given_up=True),
    Call("POST", "/pause", vllm.pause, "No engine runs a step until /resume.", query=vllm.PauseQuery),
    Call("POST", "/resume", vllm.resume, "Engines go on."),
    Call("GET", "/is_paused", vllm.is_paused, "Whether any engine was told to pause."),
    Call("POST", "/abort_requests", vllm.abort_requests, "Ends generations that came over HTTP.", vllm.AbortBody),
    Call("POST", "/sleep", vllm.sleep, "Engines give device memory up.", query=vllm.SleepQuery),
    Call("POST", "/wake_up", vllm.wake_up, "Engines take it back.", query=vllm.WakeQuery),
    Call("GET", "/is_sleeping", vllm.is_sleeping, "Whether any engine sleeps."),
    Call(
        "POST", "/reset_prefix_cache", vllm.reset_prefix_cache, "Cached prefixes are forgotten.", query=vllm.CacheQuery
    ),
    Call("GET", "/get_world_size", vllm.world_size, "Ranks that hold weights.", query=vllm.WorldQuery),
    Call("GET", "/server_info", vllm.server_info, "Settings that clients of vLLM look at.", query=vllm.InfoQuery),
    Call("POST", "/init_weight_transfer_engine", weights.init_transfer, "How weights will come.", weights.InitBody),
    Call("POST", "/start_weight_update", weights.start_update, "Begins an update.", weights.StartBody),
    Call("POST", "/update_weights", weights.update_weights, "Names weights of the update.", weights.UpdateBody),
    Call(
        "POST",
        "/finish_weight_update",
        weights.finish_update,
        "Makes them the policy of all engines.",
        weights.FinishBody,
    ),
    Call("POST", "/update_weight_version", weights.set_label, "Gives the version a name.", weights.LabelBody),
    Call("GET", "/weight_info", weights.weight_info, "The version's name."),
    Call("POST", "/weight_checker", weights.weight_checker, "Checksums of what the engines hold.", weights.CheckerBody),
    Call("POST", "/collective_rpc", weights.collective_rpc, "Refused.", weights.RpcBody),
    Call("POST", "/generate", plain.generate, "Completions, plainly.", plain.GenerateBody, is_given_up=True),
    Call("GET", "/bridge/info", plain.info, "What serves, and how often it was updated."),
    Call("GET", "/bridge/state_dict_info", plain.state_dict_info, "What a checkpoint must hold."),
    Call("GET", "/bridge/parameters", plain.parameters, "Where each tensor of a checkpoint lies in each engine."),
    Call("POST", "/bridge/notify_update", plain.notify_update, "New weights lie there: load them.", plain.NotifyBody),
    Call("POST", "/bridge/pause", plain.pause, "As /pause?mode=keep."),
    Call("POST", "/bridge/resume", plain.resume, "As /resume."),
    Call("GET", "/bridge/is_paused", vllm.is_paused, "As /is_paused."),
    Call("POST", "/bridge/sleep", plain.sleep, "As /sleep?mode=keep.", plain.LevelBody),
    Call("POST", "/bridge/wake_up", plain.wake_up, "As /wake_up."),
    Call("GET", "/bridge/is_sleeping", vllm.is_sleeping, "As /is_sleeping."),
)


def application(front: Front, token: str) -> ASGIApp:
    routes = [Route(call.path, Exchange(call, front), methods=[call.method]) for call in CALLS]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _refused}), token)


async def _refused(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    known = [call.method for call in CALLS if call.path == request.url.path]
    if error.status_code == 405:
        text = f"{request.url.path} takes {' and '.join(known)}, not {request.method}"
    else:
        text = f"there is no {request.method} {request.url.path[:200]} here; GET /openapi.json says what there is"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    answer = error_reply(HttpError(error.status_code, text, code, headers=error.headers))
    return Response(answer.content, answer.status, dict(answer.headers), answer.media_type)
