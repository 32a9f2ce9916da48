"""How a staged version gets from the trainer into vLLM's workers: what two loaders with the same methods share.

- `reload_loader.py`, on CPU: whole tensors arrive in shared memory that the workers map, and go through vLLM's own loader.
- `direct_loader.py`, on GPU: each rank's pieces are written straight into its live parameters, or, where their layout is not
  known, whole tensors go through vLLM's own loader, which can be undone (`undoable_reload.py`).

Either way the workers can reach all weights, verified, when a version is staged. They are loaded between two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from slipstream.errors import EngineFailure, FleetChanged, SlipstreamError
from slipstream.types import Destinations, Lora, Offer, Parameter, TensorSpec
from slipstream.weights import adapters
from slipstream.weights.plan import DTYPE_BYTES
from slipstream.weights.update.adapter_inboxes import AdapterInboxes
from slipstream.weights.update.transfer import Inbox

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


class Inboxes:
    """Where updates arrive: one inbox for the base model, and one for each kind of adapters, as their layouts differ. An update
    of the base model together with adapters has one of its own; the workers keep its memory mapped."""

    def __init__(self, tensors: Sequence[TensorSpec], parameters: Sequence[Parameter], dtype: str, engine: str) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._base = self.current = Inbox(parameters, dtype, engine)
        """`current` is that of the present update, or of the last."""
        self._of_adapters = AdapterInboxes(tensors, parameters, dtype, engine)
        self.offer = Offer(b"", "", "")
        """That of the present update, or of the last."""

    def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        inbox = self.current  # one that is updating raises
        if not inbox.is_updating:
            inbox = self._of_adapters.choose(offer) if offer.adapters else self._base
        destinations = inbox.begin(serving, version, offer)
        self.current, self.offer = inbox, offer
        return destinations

    @property
    def is_updating(self) -> bool:
        return self.current.is_updating

    def places(
        self, version: int, names: Iterable[str]
    ) -> tuple[dict[str, list[Place | None]], dict[Lora, dict[str, Place]]]:
        """Return where an update has arrived: tensors of the base model by rank, and those of each adapter, which are whole."""
        base, brought = adapters.split(self.current.places(version, names), self.offer.adapters)
        return base, {lora: self._parts(lora, place) for lora, (place, *_) in brought.items() if place is not None}

    def _parts(self, lora: Lora, packed: Place) -> dict[str, Place]:
        file, offset, _ = packed
        size = DTYPE_BYTES[self._dtype]
        return {
            name: (file, offset + size * start, shape) for name, start, shape in adapters.parts(self._tensors, lora)
        }

    def files(self) -> set[str]:
        """Return the files that weights arrive in, now or later."""
        return {file for inbox in (self._base, *self._of_adapters.all()) for file in inbox.files()}

    def finish(self, version: int) -> None:
        self.current.finish(version)
        self._of_adapters.close_passing()

    def close(self) -> None:
        self._base.close()
        self._of_adapters.close()


def missing_tensors(engine: str, missing: Sequence[str]) -> FleetChanged:
    return FleetChanged(
        f"engine {engine!r} has no weights and needs every tensor; {missing[0]} and {len(missing) - 1} more are missing"
    )
