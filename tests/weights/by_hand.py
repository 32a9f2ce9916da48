"""The trainer's half of an update, step by step, for tests of engines."""

from __future__ import annotations

from typing import Any

from slipstream.types import Destinations, Offer
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import make_plan
from slipstream.weights.sources import named_tensors
from slipstream.weights.update import transport_choice
from slipstream.weights.update.transfer import Outbox


class HandUpdate:
    """`update.offer` to begin with; `update.send(destinations)` moves the bytes and gives the manifests to stage with."""

    def __init__(
        self, params: Any, specs: Any, parameters: Any, dtype: str, version: int, transport: str = "memory"
    ) -> None:
        self.tensors, self.version = named_tensors.named_tensors(params), version
        self.plan = make_plan(named_tensors.describe(self.tensors), specs, parameters, dtype)
        self.offer = Offer(self.plan.to_bytes(), self.plan.fingerprint, transport_choice.offered_transport(transport))
        self.outbox = Outbox(self.plan, parameters, 0, ScanOptions())

    def send(self, destinations: Destinations, unchanged: set[str] = frozenset()) -> list[list[bytes]]:
        self.outbox.destinations = destinations
        return [[manifest] for manifest in self.outbox.send(self.tensors, unchanged, self.version)[0]]
