"""Compares what the engines compute after a sync with what the trainer computes for the same tokens (`engines/canary.py`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slipstream.bridge.fleet import Fleet
from slipstream.engines import canary
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import EngineInfo, EngineSync, SyncReport

log = logging.getLogger(__name__)

SCORE_SECONDS = 30.0

TrainerScore: TypeAlias = Callable[[list[tuple[int, ...]]], Sequence[Sequence[float]]]
"""Given token sequences, returns the logprobs of their tokens but the first under the params that are synced."""


class TrainerCanary:
    """What the trainer computes. Made before the sync, so that an error of its function comes before anything is committed."""

    def __init__(self, engine: EngineInfo, score: TrainerScore) -> None:
        """`engine` is any of the fleet. Blocks: call it in a thread."""
        self._sequences = canary.prompts(engine)
        self._expected = [np.asarray(row, np.float64) for row in score(self._sequences)]
        shapes, wanted = [row.shape for row in self._expected], [(len(row) - 1,) for row in self._sequences]
        if shapes != wanted or not all(np.isfinite(row).all() for row in self._expected):
            raise RequestError(
                f"canary must return finite logprobs of all tokens but the first, so in shapes {wanted}, got {shapes}"
            )

    async def compare(self, fleet: Fleet, engines: Sequence[EngineInfo], report: SyncReport) -> SyncReport:
        """Add the gaps to a report. Quarantine engines that disagree with the trainer, unless all of them do."""
        rows = await asyncio.gather(
            *(self._compared(fleet, row, report.version, report.adapter) for row in report.engines)
        )
        dtypes = {engine.name: engine.dtype for engine in engines}
        known = [row for row in rows if row.canary_gap is not None]
        wrong = [row for row in known if (row.canary_gap or 0.0) > canary.MAX_GAP[dtypes[row.engine]]]
        for row in wrong:
            reason = f"after the sync its logprobs differ from the trainer's by {row.canary_gap:.2g} nats per token"
            log.warning("engine %s: %s", row.engine, reason)
            if len(wrong) < len(known):
                await fleet.quarantine(row.engine, reason, report.version)
        if wrong and len(wrong) == len(known):
            log.warning("no engine agrees with the trainer: compare the weights (bridge.verify) and the models")
        return replace(report, engines=tuple(rows))

    async def _compared(self, fleet: Fleet, row: EngineSync, version: int, adapter: str) -> EngineSync:
        try:
            async with asyncio.timeout(SCORE_SECONDS):
                scores = await fleet.score(self._sequences, row.engine, adapter=adapter)
        except (SlipstreamError, TimeoutError) as error:  # some engines cannot score, and some are paused or asleep
            log.info("engine %s did not answer the canary of version %d: %s", row.engine, version, error)
            return row
        if {score.version for score in scores} != {version}:
            return row
        gaps = [np.abs(np.asarray(s.logprobs) - expected).mean() for s, expected in zip(scores, self._expected)]
        gap = float(np.mean(gaps))
        return replace(row, canary_gap=gap if math.isfinite(gap) else math.inf)
