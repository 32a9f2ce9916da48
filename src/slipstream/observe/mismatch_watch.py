"""Tracks the mismatch between trainer and engines over steps, and warns once per cause until it is over."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.observe.mismatch import Cause, MismatchDiagnosis, diagnose
from slipstream.types import VerifyReport

log = logging.getLogger(__name__)

LIMITS: Mapping[Cause, float] = {"weights": 0.0, "staleness": 0.1, "sampling": 0.1, "numerics": 0.05}
"""Nats per token, averaged over the last steps, above which a cause triggers a warning. Ratios are usually clipped at 1 ± 0.2:
a mismatch of 0.1 uses up half of that before the policy moves. Numerics reach 0.05 only in unusual cases. Wrong weights
trigger a warning at once, whatever their size."""
CLEAR = 0.5
"""A cause is over when it falls below this share of its limit, so that one near the limit triggers one warning."""
HISTORY = 4
"""Steps to average over, so that a single step with a straggler does not trigger a warning."""


class MismatchWatch:
    """`watch = MismatchWatch(lambda: bridge.verify(synced_params), dtype="bfloat16")`, then `watch.see(...)` every step.

    `verify` compares checksums. It is costly, so it is called only when the numbers suggest wrong weights, and once until
    they no longer do. `warn` is called once per cause until the cause is over; the default logs a warning."""

    def __init__(
        self,
        verify: Callable[[], VerifyReport] | None = None,
        *,
        dtype: str = "bfloat16",
        limits: Mapping[Cause, float] = LIMITS,
        warn: Callable[[Cause, MismatchDiagnosis], None] | None = None,
    ) -> None:
        self._verify, self._dtype, self._limits = verify, dtype, dict(limits)
        self._warn = warn or (
            lambda cause, diagnosis: log.warning("trainer and engines disagree: %s", diagnosis.sentence)
        )
        self._recent: deque[MismatchDiagnosis] = deque(maxlen=HISTORY)
        self._warned: set[Cause] = set()
        self._report: VerifyReport | None = None
        self._has_verified = False

    @property
    def warned(self) -> frozenset[Cause]:
        """Causes with a warning that are not over."""
        return frozenset(self._warned)

    def see(
        self, trainer: np.ndarray, processed: np.ndarray, raw: np.ndarray, age: np.ndarray, mask: np.ndarray
    ) -> MismatchDiagnosis:
        """Diagnose a step; arguments as for `diagnose`."""
        arrays: tuple[Any, ...] = (trainer, processed, raw, age, mask)
        diagnosis = diagnose(*arrays, dtype=self._dtype)
        if diagnosis.cause == "unknown":
            return diagnosis
        if not diagnosis.suspects_weights:
            self._report, self._has_verified = None, False
        else:
            if not self._has_verified:
                self._compare_weights()
            if self._report is not None:
                diagnosis = diagnose(*arrays, dtype=self._dtype, report=self._report)
        self._recent.append(diagnosis)
        for cause, limit in self._limits.items():
            self._update_warning(cause, limit, diagnosis)
        return diagnosis

    def _compare_weights(self) -> None:
        self._has_verified = True
        if self._verify is None:
            return
        try:
            self._report = self._verify()
        except SlipstreamError as error:  # a failed diagnosis must not end the run
            log.warning("could not compare the weights of trainer and engines: %s", error)

    def _update_warning(self, cause: Cause, limit: float, diagnosis: MismatchDiagnosis) -> None:
        if cause == "weights":
            is_on = is_past = any(f.cause == cause for f in diagnosis.findings)
        else:
            mean = sum(d.size(cause) for d in self._recent) / len(self._recent)
            is_past = mean > limit and diagnosis.size(cause) > 0  # do not warn of a cause that just ended
            is_on = mean > CLEAR * limit
        if is_past and cause not in self._warned:
            self._warned.add(cause)
            self._warn(cause, diagnosis)
        elif not is_on:
            self._warned.discard(cause)
