"""Runs the HTTP application with uvicorn, on the gateway's event loop: on loopback, or elsewhere with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from slipstream.config import GatewayConfig, HttpConfig
from slipstream.errors import ConfigError
from slipstream.gateway.server import CompanionServer, is_free
from slipstream.gateway.service import Service
from slipstream.gateway.tokens import TokenTable
from slipstream.http.app import create_app
from slipstream.http.connections import limited_connection
from slipstream.http.own_gateway import OwnGateway
from slipstream.http.state import Front
from slipstream.runtime import tls

log = logging.getLogger(__name__)

CALL_SECONDS = 120.0
"""Deadline of each step of a weight update, each score and each control call."""
KEEP_ALIVE_SECONDS = 75
SHUTDOWN_SECONDS = 2
BACKLOG = 4096
UNREAD_SECONDS = 120
"""The kernel drops a connection whose peer takes no data for this long, also one that is being closed."""


class _UvicornServer(uvicorn.Server):
    """Leaves signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def companion_server(config: HttpConfig, gateway: GatewayConfig, run_dir: Path | None = None) -> CompanionServer:
    """Return a function that starts the HTTP server in a gateway's process, with the dashboard of its run directory."""
    identity = tls.Identity(gateway.certificate, gateway.key) if gateway.mutual_tls else tls.ANONYMOUS

    @contextlib.asynccontextmanager
    async def start(
        service: Service, address: str, tokens: TokenTable, previous: Mapping[str, object]
    ) -> AsyncIterator[dict[str, str]]:
        def connect() -> OwnGateway:
            limit = gateway.max_message_bytes
            return OwnGateway(service, address, tokens.own, CALL_SECONDS, limit, ca=gateway.ca, identity=identity)

        fleet = connect()
        try:
            front = Front.create(fleet, connect, config, service.directory)
            service.mapping.model_name = front.model_name
            async with serve(front, tokens, previous, run_dir) as url:
                yield {"http": url}
            front.sessions.shut()
            await front.communicator.close()
        finally:
            await fleet.close()

    return start


@contextlib.asynccontextmanager
async def serve(
    front: Front, tokens: TokenTable, previous: Mapping[str, object] | None = None, run_dir: Path | None = None
) -> AsyncIterator[str]:
    """Yield the server's URL. After a crash it takes the same port again, which `previous` names, if that is free."""
    tls.check_dialable("http.host", front.config.host)
    if is_tls := bool(front.config.certificate):
        tls.server_context(front.config.certificate, front.config.key)  # its errors name the faulty file
    listener = _bind(front.config, _previous_port(front.config, previous or {}))
    server = _UvicornServer(
        uvicorn.Config(
            create_app(front, tokens, run_dir),
            loop="none",
            http=limited_connection(front.config.max_connections, front.config.body_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client must not choose the address that it is known by
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ssl_certfile=front.config.certificate or None,
            ssl_keyfile=front.config.key or None,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host = f"[{front.config.host}]" if ":" in front.config.host else front.config.host
    url = f"http{'s' if is_tls else ''}://{host}:{listener.getsockname()[1]}"
    log.info("HTTP server listens on %s", url)
    if front.config.tokenless:
        log.warning(
            "tokenless: without a token, every process on this machine may generate, pause engines and load checkpoints at %s",
            url,
        )
    try:
        yield url
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def _bind(config: HttpConfig, port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets whose protocol is TCP. Without it a body waits 40 ms behind its headers, until
    # the client acknowledges those.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    try:
        listener.bind((config.host, port))
        listener.listen(BACKLOG)  # clients may connect as soon as the address is published
    except OSError as error:
        listener.close()
        where = f"{config.host}:{port}"
        raise ConfigError(
            f"cannot listen for HTTP on {where}: {error.strerror}; is another server running there?"
        ) from None
    return listener


def _previous_port(config: HttpConfig, previous: Mapping[str, object]) -> int:
    if config.port == 0 and isinstance(url := previous.get("http"), str):
        with contextlib.suppress(ValueError):
            port = urlsplit(url).port or 0
            return port if is_free(config.host, port) else 0
    return config.port
