"""The gateway process: binds its port (with TLS beyond loopback), creates the token, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from slipstream.config import GatewayConfig
from slipstream.errors import ConfigError, Unauthorized
from slipstream.gateway import channels, slipstream_pb2_grpc
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.service import Service
from slipstream.runtime import tls
from slipstream.runtime.garbage_collection import freeze_loaded_objects

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
HEALTH_CHECK = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"


CompanionServer: TypeAlias = Callable[
    [str, str, Mapping[str, object]], contextlib.AbstractAsyncContextManager[dict[str, str]]
]
"""Another server in the gateway's process, such as the HTTP front. `companion(address, token, previous)` serves while the
context is open, and yields entries for `gateway.json`; `previous` is the content of that file if a gateway was killed here."""


class TokenCheck(grpc.aio.ServerInterceptor):
    """Bearer-token authentication for every method, known or unknown, except the standard health check."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = next((v for k, v in details.invocation_metadata or () if k == channels.TOKEN), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if details.method == HEALTH_CHECK or hmac.compare_digest(given_bytes, self._expected):
            return await continuation(details)
        return _refusal(await continuation(details))


def _refusal(handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind that answers UNAUTHENTICATED without reading a message."""
    code, text, trailing = channels.status_of(
        Unauthorized("token missing or wrong; it is in the file `token` of the gateway's run directory")
    )

    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, text, trailing)

    async def refuse_stream(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        await context.abort(code, text, trailing)
        yield  # makes this a generator

    if handler is None or not (handler.request_streaming or handler.response_streaming):
        return grpc.unary_unary_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_stream_rpc_method_handler(refuse_stream)


@contextlib.asynccontextmanager
async def running(config: GatewayConfig, token: str, service: Service | None = None) -> AsyncIterator[str]:
    """Run a gateway on this event loop; yield its address."""
    server = grpc.aio.server(interceptors=[TokenCheck(token)], options=channels.options(config.max_message_bytes))
    service, health = service or Service(config.lease_seconds), HealthServicer()
    slipstream_pb2_grpc.add_GatewayServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
    address = channels.listen(server, config)
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    leases = asyncio.create_task(service.watch_leases())
    try:
        yield address
    finally:
        leases.cancel()
        await health.enter_graceful_shutdown()
        await server.stop(grace=0.5)
        await service.close()


async def serve(
    config: GatewayConfig, run_dir: Path, stop: asyncio.Event, companion: CompanionServer | None = None
) -> None:
    """Run until `stop` is set. The address and the token are files in the run directory, deleted at the end.

    A gateway that is killed leaves them behind. The next one continues with the same address and token, so that engines and
    trainers find it again."""
    run_dir.mkdir(parents=True, exist_ok=True)
    token_file, address_file = run_dir / "token", run_dir / "gateway.json"
    token, port, previous = _left_behind(token_file, address_file, config.host)
    if not token:
        token = secrets.token_urlsafe(32)
        with open(os.open(token_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
    if config.port == 0 and port:
        config = config.replace(port=port if is_free(config.host, port) else 0)
    service = Service(config.lease_seconds, run_dir / "journal.sqlite")
    try:
        async with contextlib.AsyncExitStack() as stack:
            address = await stack.enter_async_context(running(config, token, service))
            entries: dict[str, str] = {}
            if companion is not None:
                entries |= await stack.enter_async_context(companion(address, token, previous))
            if config.ca:
                entries["ca"] = str(Path(config.ca).resolve())
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            freeze_loaded_objects()
            part = address_file.with_suffix(".part")
            part.write_text(json.dumps({"address": address, "pid": os.getpid(), **entries}))
            part.rename(address_file)  # readers never see a partial file
            log.info("gateway listening on %s", address)
            await stop.wait()
    finally:
        address_file.unlink(missing_ok=True)
        token_file.unlink(missing_ok=True)


def _left_behind(token_file: Path, address_file: Path, host: str) -> tuple[str, int, Mapping[str, object]]:
    """Return the token, the port and the file content that a killed gateway left here; nothing unless all is readable."""
    try:
        if token_file.stat().st_mode & 0o077 or token_file.stat().st_uid != os.getuid():
            raise OSError("others can read it")
        entries = json.loads(address_file.read_text())
        token, port, pid = token_file.read_text(), tls.host_of(entries["address"])[1], int(entries["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        token_file.unlink(missing_ok=True)
        return "", 0, {}
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        if not is_free(host, port):
            raise ConfigError(
                f"{address_file.parent} belongs to a gateway that is running (pid {pid}); choose another run directory"
            )
    return token, port, entries


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
