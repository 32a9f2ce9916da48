"""The gateway process: bind to loopback, make a token, serve until told to stop or until the owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from slipstream.config import GatewayConfig
from slipstream.errors import ConfigError, Unauthorized
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway import slipstream_pb2_grpc, wire
from slipstream.gateway.service import Service

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
HEALTH_CHECK = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"


class TokenCheck(grpc.aio.ServerInterceptor):
    """Every method needs the token, known or not, except the standard health check."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = next((v for k, v in details.invocation_metadata or () if k == wire.TOKEN), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if details.method == HEALTH_CHECK or hmac.compare_digest(given_bytes, self._expected):
            return await continuation(details)
        return _refusal(await continuation(details))


def _refusal(handler: grpc.RpcMethodHandler | None) -> grpc.RpcMethodHandler:
    """A handler of the same kind that answers UNAUTHENTICATED without reading a message."""
    code, text, trailing = wire.status_of(
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
    """A gateway on this event loop; gives its address."""
    server = grpc.aio.server(interceptors=[TokenCheck(token)], options=wire.options(config.max_message_bytes))
    service, health = service or Service(config.lease_seconds), HealthServicer()
    slipstream_pb2_grpc.add_GatewayServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{config.port}: {error}; is another gateway running there?"
        ) from None
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    leases = asyncio.create_task(service.watch_leases())
    try:
        yield f"{host}:{port}"
    finally:
        leases.cancel()
        await health.enter_graceful_shutdown()
        await server.stop(grace=0.5)


async def serve(config: GatewayConfig, run_dir: Path, stop: asyncio.Event) -> None:
    """Runs until `stop` is set. The address and the token are files of the run directory, gone when it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    token_file, address_file = run_dir / "token", run_dir / "gateway.json"
    token_file.unlink(missing_ok=True)
    with open(os.open(token_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(token)
    try:
        async with running(config, token) as address:
            part = address_file.with_suffix(".part")
            part.write_text(json.dumps({"address": address, "pid": os.getpid()}))
            part.rename(address_file)  # whoever finds the file finds all of it
            log.info("gateway listens on %s", address)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await stop.wait()
    finally:
        address_file.unlink(missing_ok=True)
        token_file.unlink(missing_ok=True)
