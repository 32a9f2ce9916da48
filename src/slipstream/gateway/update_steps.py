"""Runs the steps of a weight update on one engine, for an engine process and for an engine in the trainer's process alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from slipstream.errors import FleetChanged
from slipstream.runtime.failpoints import is_recording, step
from slipstream.types import UpdateReports, UpdateSteps

if TYPE_CHECKING:
    from slipstream.engines.contract import EngineBackend


async def _digest(engine: EngineBackend) -> str:
    return xxhash.xxh3_64_hexdigest(repr((await engine.checksums()).parameters).encode())


async def run_steps(engine: EngineBackend, steps: UpdateSteps) -> UpdateReports:
    """Run the steps that are present, in order. The first failure ends them; the caller then rolls the version back."""
    destinations = stage = commit = None
    if steps.offer is not None:
        step("engine.begin", version=steps.version)
        destinations = await engine.begin(steps.version, steps.offer)
        if steps.expected is not None:
            if destinations != steps.expected:
                raise FleetChanged(
                    f"engine {engine.describe().name!r} wants its weights elsewhere than after the last update; retrying"
                )
            destinations = None  # the trainer has them
    if steps.manifests is not None:
        step("engine.stage", version=steps.version)
        stage = await engine.stage(steps.version, steps.manifests)
        step("engine.staged", version=steps.version, engine=engine.describe().name)
    if steps.in_flight is not None:
        step("engine.commit", version=steps.version)
        commit = await engine.commit(steps.version, steps.in_flight)
        if is_recording():
            step("engine.committed", version=steps.version, engine=engine.describe().name, digest=await _digest(engine))
    return UpdateReports(destinations, stage, commit)
