"""What both ends of the gateway's gRPC connection share: channel options, TLS, the token, error transport and packing.

An error ends a call with a gRPC status; its class name is in the trailing metadata and its text in the status details. Small
messages of a stream travel packed into the first one (`also`): the number of messages costs more than their size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

from slipstream import errors
from slipstream.config import LOOPBACK, GatewayConfig
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.runtime import tls

ERROR_KIND = "slipstream-error"
TOKEN = "authorization"
TRAINER_PROCESS = "slipstream-trainer-process-bin"
"""Metadata of the Update stream: a serialized `TrainerProcess`."""
MAX_DETAILS = 4000
"""gRPC sends status details as a header, and headers are limited to 8 KiB."""

KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
"""A peer that is silent for this long is pinged, and is gone if it does not answer for that long."""

PACKED_BYTES = 1 << 18
"""Largest size of messages packed into one; larger messages travel alone."""

MAX_PENDING_CALLS, MAX_PENDING_SECONDS = 20_000, 600

Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or a function that returns the current one."""

Message = TypeVar("Message", pb.ToEngine, pb.FromEngine, pb.TakenGroup)

_CODES: tuple[tuple[type[errors.SlipstreamError], grpc.StatusCode], ...] = (
    (errors.UnknownEngine, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownAdapter, grpc.StatusCode.NOT_FOUND),
    (errors.MessageTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.WeightsError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.PeerError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (errors.Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (errors.ProtocolMismatch, grpc.StatusCode.INVALID_ARGUMENT),
)


def packed(messages: Iterable[Message]) -> Iterator[Message]:
    """Pack consecutive small messages into one."""
    first: Message | None = None
    size = 0
    for message in messages:
        message_size = message.ByteSize()
        if first is not None and size + message_size <= PACKED_BYTES:
            first.also.append(message)
            size += message_size
            continue
        if first is not None:
            yield first
        first, size = message, message_size
    if first is not None:
        yield first


def unpacked(message: Message) -> tuple[Message, ...]:
    """Return the messages packed into one."""
    return (message, *message.also)


async def drain(outgoing: asyncio.Queue[Message]) -> AsyncGenerator[Message, None]:
    """Yield a queue's messages, packing those that wait together."""
    while True:
        waiting = [await outgoing.get()]
        while not outgoing.empty():
            waiting.append(outgoing.get_nowait())
        for message in packed(waiting):
            yield message


def options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options that refuse oversized messages, detect a dead peer within seconds, and never share a port."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without this gRPC waits a minute for the answer to a ping, whatever the timeout above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
        # Calls that wait for the event loop. By default gRPC cancels some of them from 1,000 on, and all after 30 seconds;
        # `Admission` refuses by name.
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        # Reconnect to a restarted gateway within a second; gRPC's default backs off up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def channel(address: str, ca: str, max_message_bytes: int, identity: tls.Identity = tls.ANONYMOUS) -> grpc.aio.Channel:
    """Open a channel to a gateway: over TLS with a CA, otherwise on loopback only, as the token travels in the clear. A gateway
    with `mutual_tls` also requires an identity."""
    if ca:
        tls.client_context(ca, identity)  # raises if a file is unusable
        own = [Path(file).read_bytes() if file else None for file in (identity.key, identity.certificate)]
        credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), *own)
        return grpc.aio.secure_channel(address, credentials, options=options(max_message_bytes))
    if tls.host_of(address)[0] not in LOOPBACK:
        raise errors.ConfigError(
            f"the gateway at {address} is beyond loopback, where the token must not travel in the clear; give the run's CA "
            "(ca=, --ca or SLIPSTREAM_CA), or join by its run directory"
        )
    return grpc.aio.insecure_channel(address, options=options(max_message_bytes))


def listen(server: grpc.aio.Server, config: GatewayConfig) -> str:
    """Bind the gateway's port; return the address to dial."""
    tls.check_dialable("gateway.host", config.host)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        if config.certificate:
            tls.server_context(config.certificate, config.key)  # raises if the files are unusable
            pair = (Path(config.key).read_bytes(), Path(config.certificate).read_bytes())
            authority = Path(config.ca).read_bytes() if config.mutual_tls else None
            credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=config.mutual_tls)
            port = server.add_secure_port(f"{host}:{config.port}", credentials)
        else:
            port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise errors.ConfigError(
            f"cannot listen on {host}:{config.port}: {error}; is another gateway running there?"
        ) from None
    return f"{host}:{port}"


async def explained(
    lost: errors.GatewayLost, address: str, ca: str, identity: tls.Identity = tls.ANONYMOUS
) -> errors.SlipstreamError:
    """Return the TLS error if the gateway is reachable and TLS is why the connection failed, otherwise `lost`."""
    return await asyncio.to_thread(tls.diagnose_tls, address, ca, identity) or lost


def metadata(token: Token) -> tuple[tuple[str, str], ...]:
    token = token if isinstance(token, str) else token()
    if not (token.isascii() and token.isprintable()):
        raise errors.Unauthorized(
            "the token has characters that no token has; is it from the right file, and without the newline?"
        )
    return ((TOKEN, f"Bearer {token}"),)


def status_of(error: errors.SlipstreamError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return `(code, details, trailing metadata)` for a server to end a call with."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    kind, message = errors.to_wire(error)
    details = message if len(message) <= MAX_DETAILS else message[:MAX_DETAILS] + " … (truncated)"
    return code, details, ((ERROR_KIND, kind),)


def error_of(failed: grpc.aio.AioRpcError, peer: str, doing: str) -> errors.SlipstreamError:
    """Return the typed error of a failed call: the gateway's own error if it sent one, otherwise by gRPC status."""
    code, details = failed.code(), failed.details() or ""
    for key, value in failed.trailing_metadata() or ():
        if key == ERROR_KIND:
            refused = (errors.Unauthorized.__name__, errors.Forbidden.__name__)
            message = f"the gateway at {peer}: {details}" if value in refused else details
            return errors.from_wire(str(value), message)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.Unauthorized(
            f"the gateway at {peer} refused the token; use the one in its run directory ({details})"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.MessageTooLarge(
            f"{doing}: the message is larger than the gateway at {peer} accepts; send fewer prompts at once ({details})"
        )
    # INTERNAL without our metadata comes from gRPC itself: a stream broke, or ended while it was written to.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        return errors.GatewayLost(f"{doing}: the gateway at {peer} cannot be reached ({details})")
    if code is grpc.StatusCode.CANCELLED:
        return errors.GatewayLost(
            f"{doing}: the gateway at {peer} cancelled the call; it is shutting down, or too many calls wait"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{doing}: no answer from the gateway at {peer} in time")
    return errors.ProtocolMismatch(f"{doing}: the gateway at {peer} answered {code.name}: {details}")
