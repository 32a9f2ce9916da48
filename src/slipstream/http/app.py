"""The FastAPI application: routers, middleware and error handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.gateway.tokens import TokenTable
from slipstream.http import (
    bridge_dialect,
    errors,
    openai_chat,
    openai_dialect,
    session_routes,
    vllm_dialect,
    vllm_weights,
)
from slipstream.http.auth import BearerAuth
from slipstream.http.errors import HttpError
from slipstream.http.limits import AdmissionMiddleware, LimitedRoute
from slipstream.http.metrics import MEDIA_TYPE, MetricsMiddleware
from slipstream.http.state import CurrentFront, Front
from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.api import RunList
from slipstream.observe.dashboard.app import create_dashboard
from slipstream.observe.dashboard.recorded_run import RecordedRun

public = APIRouter(tags=["Monitoring"], route_class=LimitedRoute)
monitoring = APIRouter(tags=["Monitoring"], route_class=LimitedRoute)


@public.get("/health")
@public.head("/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Say that the process is alive. Needs no token."""
    return {"status": "alive"}


@monitoring.get("/ready")
async def ready(front: CurrentFront) -> dict[str, Any]:
    """Say whether an engine serves a committed policy; 503 until then."""
    status = await front.fleet.status()
    states = {engine.info.name: engine.state for engine in status.engines}
    if "ready" not in states.values():
        raise HttpError(503, f"no engine serves a committed policy: {states or 'none has registered'}", "not_ready")
    return {"status": "ready", "policy_version": status.version, "engines": states}


@monitoring.get("/metrics", response_class=PlainTextResponse)
async def metrics(front: CurrentFront) -> Response:
    """Return metrics for Prometheus."""
    text = front.metrics.text(await front.fleet.status(), len(front.in_flight))
    return Response(text, media_type=MEDIA_TYPE)


def create_app(front: Front, tokens: TokenTable, run_dir: Path | None = None) -> FastAPI:
    """With a `run_dir`, the dashboard of the run in it is served as well."""
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        description="A fleet of inference engines over HTTP.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to whatever host the request names
        responses=errors.RESPONSES,
        exception_handlers=dict.fromkeys(
            (RequestValidationError, HTTPException, SlipstreamError, Exception), errors.on_error
        ),
    )
    app.state.front = front
    app.include_router(public)
    document_token = Depends(HTTPBearer(auto_error=False))  # for the OpenAPI document; `BearerAuth` checks the token
    openai = (openai_dialect.router, openai_chat.router, session_routes.router)
    for router in (monitoring, *openai, vllm_dialect.router, vllm_weights.router, bridge_dialect.router):
        app.include_router(router, dependencies=[document_token])
    if run_dir is not None:
        app.add_route("/dashboard", lambda request: Response(status_code=303, headers={"Location": "dashboard/"}))
        app.mount("/dashboard", _dashboard(front, tokens, run_dir))
    app.add_middleware(MetricsMiddleware, metrics=front.metrics)
    app.add_middleware(AdmissionMiddleware, admission=front.admission)
    app.add_middleware(BearerAuth, tokens=tokens, tokenless=front.config.tokenless)  # added last, so it runs first
    return app


def _dashboard(front: Front, tokens: TokenTable, run_dir: Path) -> ASGIApp:
    run = RecordedRun(run_dir)
    access = Access(tokens.role_of, front.config.host, is_tls=bool(front.config.certificate))
    hint = "It is in the file `token` of the gateway's run directory; `slipstream token` makes one for viewers."
    return create_dashboard(RunList(lambda: [run]), access, hint)
