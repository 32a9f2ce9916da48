"""An update on its way to somebody else's server: what must hold before the first byte moves.

The server overwrites the weights it serves. So `begin` joins its workers with the trainer and `stage` looks whether all tensors
are there; both leave it as it is. The commit replaces the weights, and from its first step on there is no way back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slipstream.engines.checks import not_staged
from slipstream.engines.remote.dialect import Dialect, Way
from slipstream.errors import ChecksumMismatch, PlanMismatch, SlipstreamError, Unsupported
from slipstream.types import Berths, Offer, Parameter
from slipstream.weights.transfer import Reception, Update

START_SECONDS = 0.2
"""A server that refuses to be joined says so at once."""


class Arrivals(Reception):
    """The updates of one server, one after the other."""

    def __init__(self, dialect: Dialect, parameters: Sequence[Parameter], name: str) -> None:
        super().__init__(parameters, dialect.server.dtype, name)
        self._dialect = dialect
        self._way: Way | None = None
        """That the server has joined, or is about to."""
        self._joining: asyncio.Task[None] | None = None
        self._brings: list[Parameter] | None = None
        """What the update under way brings, once it is staged; none where nothing changed."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Berths:
        plan = self._admit(serving, version, offer)
        if any(move.sender for move in plan.moves):
            raise Unsupported(
                f"engine {self._name!r} is {self._dialect.where}, which takes whole tensors from one process; this trainer's "
                "tensors are spread over several. Gather them in the first one"
            )
        if list(dict.fromkeys(move.parameter for move in plan.moves)) != [p.name for p in self._parameters]:
            raise PlanMismatch(f"the plan brings tensors in another order than engine {self._name!r} names them")
        way = self._dialect.way(offer.transport)
        if self._way is None or way.key != self._way.key:
            if not offer.fresh:
                raise PlanMismatch(f"engine {self._name!r} has not joined the trainer; it must offer anew")
            await self._join(way)
        assert self._way is not None
        self._plan, self._update, self._brings = plan, Update(version, plan, hashed=False), None
        return Berths(((self._way.link, b""),), bytes(len(self._parameters)))

    async def _join(self, way: Way) -> None:
        """The server answers when the trainer has joined, which it does once it has our answer."""
        if self._joining is not None:
            self._joining.cancel()
        await self.disconnect()
        self._joining = asyncio.create_task(way.join())
        done, _ = await asyncio.wait({self._joining}, timeout=START_SECONDS)
        if done:
            self._joining.result()
        self._way = way

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> tuple[int, bool]:
        """Bytes that are announced, and whether those are all there are. Raises where a tensor is announced in part, or where
        the server takes all tensors or none and some are."""
        update = self._current(version)
        (pieces,), sent, num_bytes = self._manifests(update, manifests, 1)
        is_all = len(pieces) == len(update.plan.moves)
        if pieces and not is_all and self._dialect.takes_all:
            raise ChecksumMismatch(
                f"engine {self._name!r}: {len(pieces)} of {len(update.plan.moves)} pieces are announced; a "
                f"{self._dialect.client.maker.name} server takes all tensors or none"
            )
        self._check_whole(update, sent)
        if self._joining is not None:
            try:
                await asyncio.shield(self._joining)
            except SlipstreamError:
                self._way = None
                raise
            self._joining = None
        self.check(version)  # a rollback may have come meanwhile
        self._brings = [p for p in self._parameters if p.name in sent]
        return num_bytes, is_all

    def staged(self, version: int) -> bool:
        """Whether it brings tensors. Raises unless it is staged."""
        if self._update is None or self._update.version != version or self._brings is None:
            raise not_staged(self._name, version)
        return bool(self._brings)

    async def replace(self, version: int, label: str) -> None:
        """The server takes the weights, and may then hold half of the one version and half of the other."""
        assert self._way is not None and self._brings
        await self._way.replace(self._brings, version, label)

    def end(self, version: int) -> None:
        """It is committed, or rolled back. Any other is not meant."""
        if self._update is not None and self._update.version == version:
            self._update = self._brings = None

    async def disconnect(self) -> None:
        """What has been joined is of no use any more: the next trainer must offer anew."""
        way, self._way = self._way, None
        if way is not None:
            await way.leave()

    async def close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
