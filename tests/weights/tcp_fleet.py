"""Engines in this process that get weights over `tcp`: real inboxes and sockets, behind a gateway that knows no errors but theirs."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from slipstream.config import SyncOptions
from slipstream.errors import FleetChanged
from slipstream.model import families
from slipstream.runtime import event_loop
from slipstream.types import CommitReport, Destinations, EngineInfo, UpdateReports, UpdateSteps
from slipstream.weights.transports.host import tcp
from slipstream.weights.update.publisher import Publisher
from slipstream.weights.update.transfer import Inbox
from tests.tiny import tiny_config

CONFIG = tiny_config(hidden_size=64, intermediate_size=128)
BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`."""


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in families.tensors(CONFIG)}


class Engine:
    """An inbox, and what serves."""

    def __init__(self, name: str, tp: int, listen: tcp.ListenConfig | None, dtype: str) -> None:
        self.parameters, self.tp, self.dtype = families.parameters(CONFIG, tp), tp, dtype
        self.inbox = Inbox(self.parameters, dtype, name, listen)
        self.info = EngineInfo(
            name, "embedded", "model", dtype, tp, families.tensors(CONFIG), self.parameters, ("tcp", "disk"), "here", 8, 8, -1
        )  # fmt: skip
        self.version, self.serving = -1, dict[str, list[np.ndarray]]()
        self._arrived: dict[str, list[np.ndarray]] = {}
        self.before_stage: Callable[[], None] = lambda: None

    def run(self, steps: UpdateSteps) -> UpdateReports:
        destinations: Destinations | None = None
        stage = commit = None
        if steps.offer is not None:
            destinations = self.inbox.begin(self.version, steps.version, steps.offer)
            if steps.expected not in (None, destinations):
                raise FleetChanged("it wants its weights elsewhere")
        if steps.manifests is not None:
            self.before_stage()
            self._arrived, stage = self.inbox.receive(steps.version, steps.manifests)
        if steps.in_flight is not None:
            self.inbox.finish(steps.version)
            self.serving |= self._arrived
            self.version, commit = steps.version, CommitReport(0.0, 0.0)
        return UpdateReports(destinations if steps.expected is None else None, stage, commit)

    def holds(self, tensors: Mapping[str, np.ndarray]) -> None:
        dims = families.shard_dims(CONFIG, self.tp)
        for name, whole in tensors.items():
            dim = dims[name]
            whole = np.asarray(whole).astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float32)
            parts = [whole] * self.tp if dim is None else np.split(whole, self.tp, axis=dim)
            for rank, part in enumerate(parts):
                np.testing.assert_array_equal(self.serving[name][rank], part, err_msg=name)


class Fleet:
    """Engines behind a gateway that knows no errors but theirs."""

    def __init__(
        self,
        count: int,
        tp: int = 1,
        listen: tcp.ListenConfig | None = None,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        """`options` are those of `SyncOptions`."""
        self._tp, self._listen, self._dtype = tp, listen, dtype
        self.engines: dict[str, Engine] = {}
        self._lock, self._replies = asyncio.Lock(), list[asyncio.Task[dict[str, UpdateReports]]]()
        for _ in range(count):
            self.add()
        self.publisher = Publisher(self, SyncOptions(**{"transport": "tcp"} | options))
        self._infos: list[EngineInfo] = []

    def add(self) -> str:
        name = f"engine-{len(self.engines)}"
        self.engines[name] = Engine(name, self._tp, self._listen, self._dtype)
        return name

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        self._replies.append(asyncio.create_task(self._run(steps, drop_failed)))

    async def receive_reports(self) -> dict[str, UpdateReports]:
        return await self._replies.pop(0)

    async def _run(self, steps: Mapping[str, UpdateSteps], drop_failed: bool) -> dict[str, UpdateReports]:
        async with self._lock:
            calls = [asyncio.to_thread(self.engines[name].run, engine_steps) for name, engine_steps in steps.items()]
            found = dict(zip(steps, await asyncio.gather(*calls, return_exceptions=True)))
        failed = [result for result in found.values() if isinstance(result, BaseException)]
        if failed and not drop_failed:
            raise failed[0]
        return {name: result for name, result in found.items() if isinstance(result, UpdateReports)}

    async def rollback(self, version: int) -> None:
        await asyncio.gather(*self._replies, return_exceptions=True)
        self._replies = []
        for engine in self.engines.values():
            engine.inbox.rollback(version)

    async def checksums(self, engine: str = "") -> Any:
        raise NotImplementedError

    def sync(self, tensors: Mapping[str, np.ndarray], version: int, **options: Any) -> Any:
        infos = [engine.info for engine in self.engines.values()]
        self._infos = self._infos if infos == self._infos else infos
        return event_loop.run(self.publisher.publish(tensors, self._infos, version, **options))

    def sent(self) -> int:
        """Bytes that the trainer has sent over the sockets that it has open."""
        connections = [
            sender._connection._socket  # type: ignore[attr-defined]
            for route in self.publisher._routes.values()
            for sender in route.outbox._senders.values()
        ]
        return sum(_bytes_sent(connection) for connection in connections)

    def hold(self, tensors: Mapping[str, np.ndarray]) -> None:
        for engine in self.engines.values():
            engine.holds(tensors)

    def close(self) -> None:
        self.publisher.close()
        for engine in self.engines.values():
            engine.inbox.close()


def _bytes_sent(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
    return int(struct.unpack_from("<Q", info, BYTES_SENT)[0])
