"""The trainer's half of an update, step by step, for tests of what an engine does with it."""

from __future__ import annotations

from typing import Any

from slipstream.types import Berths, Offer
from slipstream.weights import source, transports
from slipstream.weights.plan import make_plan
from slipstream.weights.transfer import Outbox


class HandUpdate:
    """`update.offer` to begin with; `update.send(berths)` moves the bytes and gives the manifests to stage with."""

    def __init__(
        self, params: Any, specs: Any, parameters: Any, dtype: str, version: int, transport: str = "memory"
    ) -> None:
        self.tensors, self.version = source.named_tensors(params), version
        self.plan = make_plan(source.describe(self.tensors), specs, parameters, dtype)
        self.offer = Offer(self.plan.to_bytes(), self.plan.fingerprint, transports.invitation(transport))
        self.outbox = Outbox(self.plan, parameters, 0, True)

    def send(self, berths: Berths, unchanged: set[str] = frozenset()) -> list[list[bytes]]:
        self.outbox.berths = berths
        return [[manifest] for manifest in self.outbox.send(self.tensors, unchanged, self.version)[0]]
