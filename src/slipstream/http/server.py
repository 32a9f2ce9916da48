"""The front's server, in the gateway's process and on its event loop, ended with the gateway: on loopback, or
elsewhere with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from slipstream import tls
from slipstream.config import HttpConfig
from slipstream.errors import ConfigError
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.server import Beside, is_free
from slipstream.http.app import application
from slipstream.http.front import Front

log = logging.getLogger(__name__)

STEP_SECONDS = 120.0
"""For each step of a weight update, each score and each control call."""
KEEP_ALIVE_SECONDS = 75
ENDING_SECONDS = 2
BACKLOG = 1024


class _Server(uvicorn.Server):
    """Signals are the gateway's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def beside(config: HttpConfig, max_message_bytes: int, ca: str = "", run_dir: Path | None = None) -> Beside:
    """The front as something that runs beside a gateway: a client of it, over its own address, like any other. `run_dir` is for
    files that trainers read."""

    @contextlib.asynccontextmanager
    async def start(address: str, token: str, before: Mapping[str, object]) -> AsyncIterator[dict[str, str]]:
        def connect() -> GatewayFleet:
            return GatewayFleet(address, token, STEP_SECONDS, max_message_bytes, ca=ca)

        fleet = connect()
        try:
            async with running(Front.of(fleet, connect, config, run_dir), token, before) as url:
                yield {"http": url}
        finally:
            await fleet.close()

    return start


@contextlib.asynccontextmanager
async def running(front: Front, token: str, before: Mapping[str, object] | None = None) -> AsyncIterator[str]:
    """Gives the front's URL. One that was killed is found again at the same port, if that is free."""
    tls.check_dialable("http.host", front.config.host)
    if secure := bool(front.config.certificate):
        tls.server_context(front.config.certificate, front.config.key)  # says what is wrong with the files
    listening = _bound(front.config, _old_port(front.config, before or {}))
    server = _Server(
        uvicorn.Config(
            application(front, token),
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=ENDING_SECONDS,
            ssl_certfile=front.config.certificate or None,
            ssl_keyfile=front.config.key or None,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    host = f"[{front.config.host}]" if ":" in front.config.host else front.config.host
    url = f"http{'s' if secure else ''}://{host}:{listening.getsockname()[1]}"
    log.info("HTTP front listens on %s", url)
    try:
        yield url
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()


def _bound(config: HttpConfig, port: int) -> socket.socket:
    # asyncio sends at once (TCP_NODELAY) only where a socket says that it is TCP. Else a body waits 40 ms behind its headers,
    # for a client to acknowledge these.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, port))
        listening.listen(BACKLOG)  # from now on: whoever reads the address may connect
    except OSError as error:
        listening.close()
        where = f"{config.host}:{port}"
        raise ConfigError(
            f"cannot listen for HTTP on {where}: {error.strerror}; is another front running there?"
        ) from None
    return listening


def _old_port(config: HttpConfig, before: Mapping[str, object]) -> int:
    if config.port == 0 and isinstance(url := before.get("http"), str):
        with contextlib.suppress(ValueError):
            port = urlsplit(url).port or 0
            return port if is_free(config.host, port) else 0
    return config.port
