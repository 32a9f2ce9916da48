"""The FastAPI application: routers, middleware and error handlers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.gateway.tokens import TokenTable
from slipstream.http import bridge_dialect, errors, openai_dialect, vllm_dialect, vllm_weights
from slipstream.http.auth import BearerAuth
from slipstream.http.errors import HttpError
from slipstream.http.limits import AdmissionMiddleware, LimitedRoute
from slipstream.http.metrics import MEDIA_TYPE, MetricsMiddleware
from slipstream.http.state import CurrentFront, Front

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


def create_app(front: Front, tokens: TokenTable) -> FastAPI:
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
    for router in (monitoring, openai_dialect.router, vllm_dialect.router, vllm_weights.router, bridge_dialect.router):
        app.include_router(router, dependencies=[document_token])
    app.add_middleware(MetricsMiddleware, metrics=front.metrics)
    app.add_middleware(AdmissionMiddleware, admission=front.admission)
    app.add_middleware(BearerAuth, tokens=tokens, tokenless=front.config.tokenless)  # added last, so it runs first
    return app
