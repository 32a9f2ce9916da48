"""The dashboard on this machine, without a gateway."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from slipstream.errors import ConfigError
from slipstream.gateway.tokens import Role
from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.api import RunList
from slipstream.observe.dashboard.app import create_dashboard
from slipstream.observe.dashboard.recorded_run import find_runs

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 256
HINT = "slipstream dashboard has printed it in its terminal."


async def serve(runs: Sequence[Path], port: int, show: Callable[..., None]) -> None:
    """Serve on loopback until interrupted. `show` prints lines: where the page is."""
    token = secrets.token_urlsafe(32)

    def role_of(given: bytes) -> Role | None:
        return "viewer" if hmac.compare_digest(given, token.encode()) else None

    access = Access(role_of, HOST, code=secrets.token_urlsafe(32))
    app = create_local_app(runs, access)
    listener = _bind(port)
    url = f"http://{HOST}:{listener.getsockname()[1]}/dashboard/"
    show(
        f"dashboard of {', '.join(str(run) for run in runs)}",
        f"open       {url}login?code={access.code}   (works once)",
        f"later      {url} with the token {token}",
        "Ctrl-C ends it.",
    )
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def create_local_app(runs: Sequence[Path], access: Access) -> Starlette:
    """The application of the local server, for tests as well."""
    dashboard = create_dashboard(RunList(lambda: find_runs(list(runs))), access, HINT)

    async def to_dashboard(_: Request) -> RedirectResponse:
        return RedirectResponse("/dashboard/", 303)

    return Starlette(
        routes=[Route("/", to_dashboard), Route("/dashboard", to_dashboard), Mount("/dashboard", dashboard)]
    )


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {HOST}:{port}: {error}; choose another --port, or 0 for a free one"
        ) from None
    return listener
