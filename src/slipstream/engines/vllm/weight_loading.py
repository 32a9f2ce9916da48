"""How a staged version gets from the trainer into vLLM's workers: what two loaders with the same methods share.

- `reload_loader.py`, on CPU: whole tensors arrive in shared memory that the workers map, and go through vLLM's own loader.
- `direct_loader.py`, on GPU: each rank's pieces are written straight into its live parameters, or, where their layout is not
  known, whole tensors go through vLLM's own loader, which can be undone (`undoable_reload.py`).

Either way the workers can reach all weights, verified, when a version is staged. They are loaded between two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from slipstream.errors import EngineFailure, FleetChanged, SlipstreamError

WORKER_WAIT_SECONDS = 0.02
"""How long a call to the workers waits for weights in transit before vLLM may take its next step."""

CallWorkers: TypeAlias = Callable[..., Awaitable[list[Any]]]
"""Calls a method of the worker extension, by name, on all workers, and returns their results."""

Place: TypeAlias = tuple[str, int, tuple[int, ...]]
"""A tensor in shared memory: file, offset, shape."""


class WeightsPending(Exception):
    """The weights to load are still in transit. Nothing has changed, and loading may be retried."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds
        """How long no step could run."""


class MappedFiles:
    """The files of shared memory that the workers have mapped."""

    def __init__(self, engine: str, call_workers: CallWorkers) -> None:
        self._engine, self._call_workers = engine, call_workers
        self._files: set[str] = set()

    async def map(self, files: set[str]) -> None:
        """Make the workers map these files, and unmap all others."""
        if files == self._files:
            return
        try:
            await self._call_workers("slipstream_map_files", sorted(files))
        except SlipstreamError:
            raise
        except Exception as error:
            raise EngineFailure(
                f"engine {self._engine!r}: workers failed to map the shared memory that holds the weights: "
                f"{type(error).__name__}: {error}"
            ) from None
        self._files = files


def missing_tensors(engine: str, missing: Sequence[str]) -> FleetChanged:
    return FleetChanged(
        f"engine {engine!r} has no weights and needs every tensor; {missing[0]} and {len(missing) - 1} more are missing"
    )
