"""The mismatch between trainer and engines, step after step: warns once of each cause, until it is over."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.observe.mismatch import Cause, Diagnosis, diagnose
from slipstream.types import VerifyReport

log = logging.getLogger(__name__)

LIMITS: Mapping[Cause, float] = {"weights": 0.0, "staleness": 0.1, "sampling": 0.1, "numerics": 0.05}
"""Nats per token, mean over the last steps, beyond which a cause is warned of. Ratios are usually clipped at 1 ± 0.2: at 0.1
the mismatch has used up half of that before the policy has moved. Numerics cannot be trained away, and reach 0.05 only when
something is out of the ordinary. Wrong weights are warned of whatever they amount to, and at once."""
CLEAR = 0.5
"""A cause is over when it is below this share of its limit: one that hovers at the limit is warned of once."""
HISTORY = 4
"""Steps whose mean is judged: one step with a straggler is no trend."""


class Watch:
    """`watch = Watch(lambda: bridge.verify(synced_params), dtype="bfloat16")`, then `watch.see(...)` every step.

    `verify` compares checksums. It is costly, so it is called only when the numbers speak of wrong weights, and once until
    they no longer do. `warn` is told of a cause once until it is over; without it, the log is."""

    def __init__(
        self,
        verify: Callable[[], VerifyReport] | None = None,
        *,
        dtype: str = "bfloat16",
        limits: Mapping[Cause, float] = LIMITS,
        warn: Callable[[Cause, Diagnosis], None] | None = None,
    ) -> None:
        self._verify, self._dtype, self._limits = verify, dtype, dict(limits)
        self._warn = warn or (lambda cause, found: log.warning("trainer and engines disagree: %s", found.sentence))
        self._recent: deque[Diagnosis] = deque(maxlen=HISTORY)
        self._warned: set[Cause] = set()
        self._report: VerifyReport | None = None
        self._has_asked = False

    @property
    def warned(self) -> frozenset[Cause]:
        """Causes that were warned of and are not over."""
        return frozenset(self._warned)

    def see(
        self, trainer: np.ndarray, processed: np.ndarray, raw: np.ndarray, age: np.ndarray, mask: np.ndarray
    ) -> Diagnosis:
        """A step's arrays, as `diagnose` takes them; what it says of them."""
        arrays: tuple[Any, ...] = (trainer, processed, raw, age, mask)
        found = diagnose(*arrays, dtype=self._dtype)
        if found.cause == "unknown":
            return found
        if not found.suspects_weights:
            self._report, self._has_asked = None, False
        else:
            if not self._has_asked:
                self._ask()
            if self._report is not None:
                found = diagnose(*arrays, dtype=self._dtype, report=self._report)
        self._recent.append(found)
        for cause, limit in self._limits.items():
            self._judge(cause, limit, found)
        return found

    def _ask(self) -> None:
        self._has_asked = True
        if self._verify is None:
            return
        try:
            self._report = self._verify()
        except SlipstreamError as error:  # a diagnosis must not end a run
            log.warning("weights of trainer and engines could not be compared: %s", error)

    def _judge(self, cause: Cause, limit: float, found: Diagnosis) -> None:
        if cause == "weights":
            is_on = is_past = any(f.cause == cause for f in found.findings)
        else:
            mean = sum(d.size(cause) for d in self._recent) / len(self._recent)
            is_past = mean > limit and found.size(cause) > 0  # what is over is not news
            is_on = mean > CLEAR * limit
        if is_past and cause not in self._warned:
            self._warned.add(cause)
            self._warn(cause, found)
        elif not is_on:
            self._warned.discard(cause)
