"""The gateway process: binds its port (with TLS beyond loopback), creates the token, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
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
from slipstream.errors import ConfigError, Forbidden, Unauthorized
from slipstream.gateway import channels, slipstream_pb2_grpc
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.admission import Admission
from slipstream.gateway.mapping_file import MappingFile
from slipstream.gateway.service import Service
from slipstream.gateway.tokens import RUN_TOKEN, Role, TokenTable
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.runtime import tls
from slipstream.runtime.failpoints import step
from slipstream.runtime.garbage_collection import freeze_loaded_objects
from slipstream.runtime.private_files import private_directory, private_file, write_private

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
HEALTH_CHECK = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"


METHODS: Mapping[str, tuple[Role, ...]] = {
    "Status": ("trainer", "engine", "client", "viewer"),
    "Fleet": ("trainer", "client", "viewer"),
    "Generate": ("trainer", "client"),
    "Score": ("trainer", "client"),
    "Submit": ("trainer",),
    "Take": ("trainer",),
    "Control": ("trainer",),
    "Quarantine": ("trainer",),
    "Drain": ("trainer",),
    "Update": ("trainer",),
    "Attach": ("engine",),
}
"""The roles that may call each method; `run` may call all of them, and methods that are not listed."""

CompanionServer: TypeAlias = Callable[
    [Service, str, TokenTable, Mapping[str, object]], contextlib.AbstractAsyncContextManager[dict[str, str]]
]
"""Another server in the gateway's process, such as the HTTP front. `companion(service, address, tokens, previous)` serves while
the context is open, and yields entries for `gateway.json`; `previous` is the content of that file if a gateway was killed
here."""


class TokenCheck(grpc.aio.ServerInterceptor):
    """Bearer-token authentication for every method, known or unknown, except the standard health check."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if details.method == HEALTH_CHECK:
            return handler
        given = next((v for k, v in details.invocation_metadata or () if k == channels.TOKEN), "")
        scheme, _, token = (given if isinstance(given, bytes) else given.encode()).partition(b" ")
        role = self._tokens.role_of(token) if scheme == b"Bearer" else None
        if role is None:
            return _refusal(
                handler,
                Unauthorized("token missing or wrong; it is in the file `token` of the gateway's run directory"),
            )
        if role == "run":
            return handler
        service, _, method = details.method.removeprefix("/").partition("/")
        if service == SERVICE and role not in METHODS.get(method, ()):
            return _refusal(handler, Forbidden(f"a token of the role {role!r} does not permit {method}"))
        return _until_revoked(handler, lambda: self._tokens.role_of(token) == role)


def _until_revoked(handler: grpc.RpcMethodHandler | None, is_valid: Callable[[], bool]) -> grpc.RpcMethodHandler | None:
    """Return a handler that reads a stream of messages only as long as the token is valid. Engines and trainers hold such
    streams open for days. They handle the messages in coroutines; gRPC's own services do so in generators."""
    if handler is None or not inspect.iscoroutinefunction(serve := handler.stream_stream):
        return handler

    async def checked(messages: AsyncIterator[object]) -> AsyncIterator[object]:
        async for message in messages:
            if not is_valid():
                raise Unauthorized("the token of this stream was revoked")
            yield message

    async def serve_checked(messages: AsyncIterator[object], context: grpc.aio.ServicerContext) -> None:
        await serve(checked(messages), context)

    return grpc.stream_stream_rpc_method_handler(
        serve_checked, handler.request_deserializer, handler.response_serializer
    )


def _refusal(handler: grpc.RpcMethodHandler | None, error: Unauthorized) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind that answers with the error without reading a message."""
    code, text, trailing = channels.status_of(error)

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
async def running(
    config: GatewayConfig, tokens: TokenTable | str, service: Service | None = None
) -> AsyncIterator[str]:
    """Run a gateway on this event loop, with these tokens or only that of the run; yield its address."""
    tokens = tokens if isinstance(tokens, TokenTable) else TokenTable(tokens)
    server = grpc.aio.server(interceptors=[TokenCheck(tokens)], options=channels.options(config.max_message_bytes))
    service, health = service or Service(config.lease_seconds, admission=_admission(config)), HealthServicer()
    slipstream_pb2_grpc.add_GatewayServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
    address = channels.listen(server, config)
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    duties = (service.watch_leases(), service.write_mapping(), service.record_status())
    tasks = [asyncio.create_task(duty) for duty in duties]
    try:
        yield address
    finally:
        for task in tasks:
            task.cancel()
        await health.enter_graceful_shutdown()
        await server.stop(grace=0.5)
        await service.close()


async def serve(
    config: GatewayConfig,
    run_dir: Path,
    stop: asyncio.Event,
    companion: CompanionServer | None = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Run until `stop` is set. The address and the token are files in the run directory, deleted at the end. `facts` are
    further entries of gateway.json.

    A gateway that is killed leaves them behind, and so does one that fails in its place. The next one continues with the same
    address and token, so that engines and trainers find it again."""
    private_directory(run_dir, "the run directory")
    token_file, address_file = run_dir / RUN_TOKEN, run_dir / "gateway.json"
    token, port, previous = _left_behind(token_file, address_file, config.host)
    if not token:
        write_private(token_file, token := secrets.token_urlsafe(32))
    if config.port == 0 and port:
        config = config.replace(port=port if is_free(config.host, port) else 0)
    tokens = TokenTable(token, run_dir)
    logs = os.environ.get("LOGDIR")
    mapping = MappingFile([run_dir, Path(logs)] if logs else [run_dir])
    recorder = FleetRecorder(run_dir if config.record or companion is not None else None)
    journal = private_file(run_dir / "journal.sqlite")
    service = Service(config.lease_seconds, journal, _admission(config), mapping, recorder)
    is_expected = False  # whether engines and trainers wait for the next gateway under this address
    try:
        async with contextlib.AsyncExitStack() as stack:
            address = await stack.enter_async_context(running(config, tokens, service))
            entries: dict[str, str] = {}
            if companion is not None:
                entries |= await stack.enter_async_context(companion(service, address, tokens, previous))
            if config.ca:
                entries |= _tls_entries(config)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            freeze_loaded_objects()
            step("launch.gateway", position=service.position)
            own = {"address": address, "pid": os.getpid(), **(facts or {})}
            write_private(address_file, json.dumps(own | entries))
            log.info("gateway listening on %s", address)
            await stop.wait()
    except Exception:
        is_expected = bool(previous)
        raise
    finally:
        if not is_expected:
            address_file.unlink(missing_ok=True)
            token_file.unlink(missing_ok=True)


def _admission(config: GatewayConfig) -> Admission:
    return Admission(config.max_requests, config.max_buffered_bytes, "the gateway")


def _tls_entries(config: GatewayConfig) -> dict[str, str]:
    """Return what those who join by the run directory need: the CA, and with `mutual_tls` a certificate to show. The key's
    file stays as private as it is."""
    names = ("ca", "certificate", "key") if config.mutual_tls else ("ca",)
    return {name: str(Path(getattr(config, name)).resolve()) for name in names}


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
    return not _bind_error(host, port)


def check_port(what: str, host: str, port: int) -> None:
    """Raise `ConfigError` if a server cannot listen there. Port 0 is any free one."""
    if error := _bind_error(host, port):
        raise ConfigError(f"{what}: cannot listen on {host}:{port}: {error}; choose another port, or 0 for a free one")


def _bind_error(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""
