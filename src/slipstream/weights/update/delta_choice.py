"""Whether one engine is sent deltas or whole weights."""

from __future__ import annotations

from slipstream.config import SyncOptions
from slipstream.types import EngineInfo
from slipstream.weights import delta
from slipstream.weights.plan import DTYPE_BYTES, Plan
from slipstream.weights.update.transfer import Sent
from slipstream.weights.update.transport_choice import SMALL_BYTES, takes_deltas

CODEC_SPEED = 1e9
"""Bytes of whole weights per second that are compared and encoded, until it is measured."""
SHARE = 0.05
"""Size of a delta relative to the weights, until one was sent."""


class DeltaChoice:
    """Measures the link with whole weights, then sends deltas if they should be faster. So the first sync over a slow link is
    whole, and so is the second, whose values are kept to compare the third with."""

    def __init__(self, engine: EngineInfo, plan: Plan, transport: str, options: SyncOptions) -> None:
        can_apply = takes_deltas(transport) and engine.kind != "remote"
        self._is_possible = can_apply and options.checksums and DTYPE_BYTES[plan.dtype] == delta.ITEMSIZE
        self._mode, self._is_small = options.delta, plan.num_bytes <= SMALL_BYTES
        self._link_speed, self._share = 0.0, SHARE

    def wants_deltas(self, codec_speed: float) -> bool:
        """`codec_speed` is 0 if it is not known."""
        if not self._is_possible or self._mode == "never":
            return False
        if self._mode != "auto":
            return True
        if self._is_small or not self._link_speed:
            return False
        return delta.is_faster(self._link_speed, codec_speed or CODEC_SPEED, self._share)

    def note(self, sent: Sent, num_bytes: int, seconds: float) -> None:
        """Note that weights of `num_bytes` have arrived after `seconds`."""
        if num_bytes <= SMALL_BYTES:
            return
        if sent.num_deltas:
            self._share = sent.num_bytes / num_bytes
        else:
            self._link_speed = num_bytes / seconds
            self._share = max(SHARE, self._share / 2)  # training changes: after a while, try again
