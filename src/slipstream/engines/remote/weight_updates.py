"""Updates of a server's weights: what is checked before the first byte moves.

A server overwrites its serving weights. So `begin` only connects the server with the trainer, and `stage` checks that the
announced tensors are complete; neither changes the weights. `commit` replaces them, and cannot be undone once started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slipstream.engines.frontend.checks import not_staged
from slipstream.engines.remote.dialect import Dialect, WeightChannel
from slipstream.errors import ChecksumMismatch, PlanMismatch, SlipstreamError, Unsupported
from slipstream.types import Destinations, Offer, Parameter
from slipstream.weights.update.transfer import IncomingUpdate, UpdateReceiver

REFUSAL_SECONDS = 0.2
"""How long to wait for the server to refuse a connection; a refusal comes at once."""


class ServerUpdates(UpdateReceiver):
    """The updates of one server, one at a time."""

    def __init__(self, dialect: Dialect, parameters: Sequence[Parameter], name: str) -> None:
        super().__init__(parameters, dialect.server.dtype, name)
        self._dialect = dialect
        self._channel: WeightChannel | None = None
        """The channel that is connected or connecting."""
        self._connecting: asyncio.Task[None] | None = None
        self._staged: list[Parameter] | None = None
        """What the staged update brings; empty if nothing changed."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        plan = self._admit(serving, version, offer)
        if any(move.sender for move in plan.moves):
            raise Unsupported(
                f"engine {self._name!r} is {self._dialect.name}, which takes whole tensors from one process; this trainer's "
                "tensors are spread over several. Gather them in the first process"
            )
        if list(dict.fromkeys(move.parameter for move in plan.moves)) != [p.name for p in self._parameters]:
            raise PlanMismatch(f"the plan sends tensors in a different order than engine {self._name!r} lists them")
        channel = self._dialect.channel(offer.transport)
        if self._channel is None or channel.key != self._channel.key:
            if not offer.fresh:
                raise PlanMismatch(
                    f"engine {self._name!r} is not connected with the trainer; it must make a fresh offer"
                )
            await self._connect(channel)
        assert self._channel is not None
        self._plan, self._update, self._staged = plan, IncomingUpdate(version, plan, hashed=False), None
        return Destinations(((self._channel.link, b""),), bytes(len(self._parameters)))

    async def _connect(self, channel: WeightChannel) -> None:
        """Start connecting. The server answers when the trainer has connected, which needs our answer first."""
        if self._connecting is not None:
            self._connecting.cancel()
        await self.disconnect()
        self._connecting = asyncio.create_task(channel.connect())
        done, _ = await asyncio.wait({self._connecting}, timeout=REFUSAL_SECONDS)
        if done:
            self._connecting.result()
        self._channel = channel

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> tuple[int, bool]:
        """Return the number of bytes announced, and whether that is every tensor. Raise if a tensor is announced in part, or
        if some are missing and the server needs all or none."""
        update = self._current(version)
        (pieces,), sent, num_bytes = self._manifests(update, manifests, 1)
        is_complete = len(pieces) == len(update.plan.moves)
        if pieces and not is_complete and self._dialect.needs_all_tensors:
            raise ChecksumMismatch(
                f"engine {self._name!r}: {len(pieces)} of {len(update.plan.moves)} pieces are announced; a "
                f"{self._dialect.client.kind.name} server takes all tensors or none"
            )
        self._check_complete(update, sent)
        if self._connecting is not None:
            try:
                await asyncio.shield(self._connecting)
            except SlipstreamError:
                self._channel = None
                raise
            self._connecting = None
        self.check(version)  # it may have been rolled back meanwhile
        self._staged = [p for p in self._parameters if p.name in sent]
        return num_bytes, is_complete

    def check_staged(self, version: int) -> bool:
        """Return whether the staged version brings tensors. Raise `UnknownVersion` unless it is staged."""
        if self._update is None or self._update.version != version or self._staged is None:
            raise not_staged(self._name, version)
        return bool(self._staged)

    async def replace_weights(self, version: int, label: str) -> None:
        """After an error, the server may hold a mix of two versions."""
        assert self._channel is not None and self._staged
        await self._channel.replace_weights(self._staged, version, label)

    def end(self, version: int) -> None:
        """End this update, which is committed or rolled back. Another one in progress is left alone."""
        if self._update is not None and self._update.version == version:
            self._update = self._staged = None

    async def disconnect(self) -> None:
        """Close the channel; the next trainer must make a fresh offer."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.disconnect()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
