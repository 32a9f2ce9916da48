"""The label by which an engine recognizes its weights on a server."""

from __future__ import annotations

import asyncio
import secrets

from slipstream.engines.remote.dialect import Dialect
from slipstream.errors import EngineLost


class WeightLabel:
    """The `weight_version` that the server carries for us. A server that was restarted, or updated by another client, carries
    a different one, and its completions do not come from our policy version."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._id, self._text = dialect, secrets.token_hex(4), ""
        self._query: asyncio.Task[None] | None = None
        """The next query, if it has not been sent yet."""
        self._querying = asyncio.Lock()

    def of(self, version: int | str) -> str:
        """Return the label of a version, which no other client would choose."""
        return f"slipstream-{self._id}-{version}"

    async def set(self, version: int | str) -> None:
        """Label weights that stay as they are."""
        await self._dialect.set_label(self.of(version))
        self.was_set(version)

    def was_set(self, version: int | str) -> None:
        """Take note that an update has set the label."""
        self._text = self.of(version)

    async def verify(self, carried: str | None) -> None:
        """Raise `EngineLost` unless the server still holds our weights, by the label that its response carried. Without one,
        the server is asked; one query serves all requests that end before it is sent."""
        if carried is not None:
            return self._compare(self._text, carried)
        if self._query is None:
            self._query = asyncio.create_task(self._ask())
            self._query.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._query)

    async def _ask(self) -> None:
        async with self._querying:
            self._query = None  # requests that end from now on need another query
            expected = self._text
            self._compare(expected, await self._dialect.label())

    def _compare(self, expected: str, label: str) -> None:
        if label != expected:
            raise EngineLost(
                f"{self._dialect.name} holds weights labelled {label!r}, expected {expected!r}: it was restarted, or another "
                "client updates it. Restart this engine"
            )
