"""Runs the steps of a weight update on one engine, for an engine process and for an engine in the trainer's process alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import FleetChanged
from slipstream.types import UpdateReports, UpdateSteps

if TYPE_CHECKING:
    from slipstream.engines.contract import EngineBackend


async def run_steps(engine: EngineBackend, steps: UpdateSteps) -> UpdateReports:
    """Run the steps that are present, in order. The first failure ends them; the caller then rolls the version back."""
    destinations = stage = commit = None
    if steps.offer is not None:
        destinations = await engine.begin(steps.version, steps.offer)
        if steps.expected is not None:
            if destinations != steps.expected:
                raise FleetChanged(
                    f"engine {engine.describe().name!r} wants its weights elsewhere than after the last update; retrying"
                )
            destinations = None  # the trainer has them
    if steps.manifests is not None:
        stage = await engine.stage(steps.version, steps.manifests)
    if steps.in_flight is not None:
        commit = await engine.commit(steps.version, steps.in_flight)
    return UpdateReports(destinations, stage, commit)
