"""Updates in which a trainer writes vLLM's live parameters itself, on the same GPU (`shared-engine`). No step runs from begin
to commit. There is no other copy: an update that is rolled back leaves the engine without weights."""

from __future__ import annotations

import time

from slipstream.engines.frontend.step_control import StepControl
from slipstream.engines.vllm.weight_loading import CallWorkers
from slipstream.errors import Unsupported, UpdateInProgress, VersionError
from slipstream.types import Destinations


class InPlaceUpdates:
    """`version` is the one being written; -1 if there is none. Steps must not start meanwhile (`StepControl.may_start`)."""

    def __init__(self, engine: str, call_workers: CallWorkers) -> None:
        self._engine, self._call_workers = engine, call_workers
        self.version = -1
        self.began = 0.0

    async def begin(self, steps: StepControl, serving: int, version: int) -> Destinations:
        """Stop stepping, and say where the parameters lie."""
        if self.version >= 0:
            raise UpdateInProgress(f"engine {self._engine!r} is being updated to version {self.version}")
        if version <= serving:
            raise VersionError(
                f"engine {self._engine!r} serves version {serving}, offered is {version}; versions must increase"
            )
        async with steps.lock:
            self.version, self.began = version, time.perf_counter()
            try:
                await steps.stop()
                (link,) = await self._call_workers("slipstream_export")
                if isinstance(link, str):
                    raise Unsupported(f"engine {self._engine!r} cannot share its weights: {link}")
            except BaseException:
                self.version = -1
                await steps.start()
                raise
        return Destinations(((bytes(link),),), b"")

    async def end(self, steps: StepControl) -> float:
        """Step again, with `steps.lock` held. Return the seconds since begin."""
        self.version = -1
        await steps.start()
        return time.perf_counter() - self.began
