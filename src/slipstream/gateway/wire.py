"""What both ends of the gateway's gRPC connection must agree on: channel options, TLS, the token, and how errors travel.

An error ends a call with a gRPC status; its class name rides in the trailing metadata, its text in the status details. Small
messages of a stream travel together, each in the one before (`also`): it is their number that costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from slipstream import errors, tls
from slipstream.config import LOOPBACK, GatewayConfig
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    GatewayLost,
    MessageTooLarge,
    NotReady,
    PeerError,
    ProtocolMismatch,
    RequestError,
    SlipstreamError,
    Unauthorized,
    UnknownEngine,
    WeightsError,
)
from slipstream.gateway import slipstream_pb2 as pb

ERROR_KIND = "slipstream-error"
TOKEN = "authorization"
TRAINER = "slipstream-trainer"
"""Which of a trainer's processes this is: `rank/world`."""
MAX_DETAILS = 4000
"""gRPC sends status details as a header, and headers are limited to 8 KiB."""

PACKED_BYTES = 1 << 18
"""Messages above this travel alone."""

Message = TypeVar("Message", pb.ToEngine, pb.FromEngine, pb.TakenGroup)

_CODES: tuple[tuple[type[SlipstreamError], grpc.StatusCode], ...] = (
    (UnknownEngine, grpc.StatusCode.NOT_FOUND),
    (MessageTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (WeightsError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (ProtocolMismatch, grpc.StatusCode.INVALID_ARGUMENT),
)


def packed(messages: Iterable[Message]) -> Iterator[Message]:
    """The same, as few."""
    first: Message | None = None
    size = 0
    for message in messages:
        own = message.ByteSize()
        if first is not None and size + own <= PACKED_BYTES:
            first.also.append(message)
            size += own
            continue
        if first is not None:
            yield first
        first, size = message, own
    if first is not None:
        yield first


def apart(message: Message) -> tuple[Message, ...]:
    return (message, *message.also)


async def together(outgoing: asyncio.Queue[Message]) -> AsyncGenerator[Message, None]:
    """What is put into the queue, packed with whatever waits behind it."""
    while True:
        waiting = [await outgoing.get()]
        while not outgoing.empty():
            waiting.append(outgoing.get_nowait())
        for message in packed(waiting):
            yield message


def options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Refuse oversized messages, notice a dead peer within seconds, and never share a port by accident."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
        # Reconnect to a restarted gateway within a second, not after gRPC's default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def channel(address: str, ca: str, max_message_bytes: int) -> grpc.aio.Channel:
    """To a gateway: with a CA over TLS; without, over loopback only, since whoever listens on the way would read the token."""
    if ca:
        tls.client_context(ca)  # says what is wrong with the file
        credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
        return grpc.aio.secure_channel(address, credentials, options=options(max_message_bytes))
    if tls.host_of(address)[0] not in LOOPBACK:
        raise ConfigError(
            f"the gateway at {address} is beyond loopback, and no token is sent there in the clear: name the CA of the run "
            "(ca=, --ca or SLIPSTREAM_CA), or join by its run directory"
        )
    return grpc.aio.insecure_channel(address, options=options(max_message_bytes))


def listen(server: grpc.aio.Server, config: GatewayConfig) -> str:
    """Binds the gateway's port; returns the address to dial."""
    tls.check_dialable("gateway.host", config.host)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        if config.certificate:
            tls.server_context(config.certificate, config.key)  # says what is wrong with the files
            pair = (Path(config.key).read_bytes(), Path(config.certificate).read_bytes())
            port = server.add_secure_port(f"{host}:{config.port}", grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{config.port}: {error}; is another gateway running there?"
        ) from None
    return f"{host}:{port}"


async def explained(lost: GatewayLost, address: str, ca: str) -> SlipstreamError:
    """The same, or, where the gateway is there and TLS is the reason, what is wrong with it."""
    return await asyncio.to_thread(tls.disagreement, address, ca) or lost


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    if not (token.isascii() and token.isprintable()):
        raise Unauthorized(
            "the token has characters that no token has; was it read from the right file, without its newline?"
        )
    return ((TOKEN, f"Bearer {token}"),)


def status_of(error: SlipstreamError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """`(code, details, trailing metadata)` with which a server ends a call."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    kind, message = errors.to_wire(error)
    details = message if len(message) <= MAX_DETAILS else message[:MAX_DETAILS] + " … (cut)"
    return code, details, ((ERROR_KIND, kind),)


def error_of(failed: grpc.aio.AioRpcError, peer: str, doing: str) -> SlipstreamError:
    """The typed error behind a failed call: the gateway's own word where it gave one, else what the status means."""
    code, details = failed.code(), failed.details() or ""
    for key, value in failed.trailing_metadata() or ():
        if key == ERROR_KIND:
            said = f"the gateway at {peer}: {details}" if value == Unauthorized.__name__ else details
            return errors.from_wire(str(value), said)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthorized(f"the gateway at {peer} refused the token; use the one in its run directory ({details})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(
            f"{doing}: the message is larger than the gateway at {peer} takes; send fewer prompts at once ({details})"
        )
    # INTERNAL without our own word comes from gRPC itself: a stream that broke, or was ended while it was written to.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        return GatewayLost(f"{doing}: the gateway at {peer} cannot be reached ({details})")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{doing}: no answer from the gateway at {peer} in time")
    return ProtocolMismatch(f"{doing}: the gateway at {peer} answered {code.name}: {details}")
