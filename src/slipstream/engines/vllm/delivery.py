"""How a version gets from a trainer into vLLM's workers, in two ways.

- `Reloaded`: whole tensors land in shared memory that the workers map, and go through vLLM's own loader. On CPU, where linear
  weights are packed after loading and a live parameter cannot be written to.
- `Direct`: each rank's pieces go straight into its live, fused parameters: copied from the trainer's own GPU memory (`cuda`),
  received over NCCL, or taken from shared memory. On GPU.

Either way everything is within the workers' reach, and checked, before a version is staged; it is loaded between two steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from slipstream.engines.checks import not_staged
from slipstream.errors import EngineFailure, FleetChanged, SlipstreamError, TransferError, Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import Berths, Offer, Parameter, ParameterChecksums, StageReport
from slipstream.weights import families
from slipstream.weights.checksum import without_version
from slipstream.weights.device import PLANES
from slipstream.weights.families.live import written_parameters
from slipstream.weights.image import num_bytes
from slipstream.weights.plan import Plan
from slipstream.weights.transfer import Inbox, Reception, Update
from slipstream.weights.transports import is_quick

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.02
"""For what is still on its way, before vLLM may take its next step."""

HASHED_BYTES = 256 << 20
"""Read back and hashed by a worker before vLLM may take its next step."""

T = TypeVar("T")

Call: TypeAlias = Callable[..., Awaitable[list[Any]]]
"""A method of the extension's, by name, on all workers: their answers."""

Place: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Where a tensor lies: a file of shared memory, the offset in it, the shape."""


class NotHere(Exception):
    """What is to be loaded is still on its way. Nothing was changed, and it may be tried again."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds
        """For which no step ran."""


class Delivery(Protocol):
    parameters: tuple[Parameter, ...]
    num_ranks: int
    num_bytes: int
    transports: tuple[str, ...]
    is_one_call: bool
    """Whether `load` is a single call to the workers, which vLLM makes between two steps by itself: then nothing need stop
    them."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Berths: ...

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport: ...

    def check_staged(self, version: int) -> None:
        """Raises `UnknownVersion` unless this version is staged."""
        ...

    async def load(self, version: int) -> tuple[dict[str, int], float]:
        """Between two steps: makes it what the workers compute with. Returns how many tokens each running sample had drawn,
        and the seconds that workers spent. Raises `NotHere` if the order has overtaken the weights."""
        ...

    async def restore(self) -> None:
        """`load` failed half-way: brings back what it may have overwritten, or raises."""
        ...

    def finish(self, version: int) -> None: ...

    async def rollback(self, version: int) -> None: ...

    async def checksums(self) -> tuple[ParameterChecksums, ...]:
        """Of what the workers compute with."""
        ...

    def dropped(self) -> None:
        """The weights are gone (sleep level 2)."""
        ...

    async def release(self) -> None:
        """The trainer is gone."""
        ...

    @property
    def is_updating(self) -> bool: ...

    def close(self) -> None: ...


class Reloaded:
    is_one_call = False
    transports: tuple[str, ...] = ("shm",)

    def __init__(self, name: str, model: ModelConfig, dtype: str, call: Call, has_checkpoint: bool) -> None:
        self._name, self._dtype, self._call = name, dtype, call
        self._has_weights = self._has_checkpoint = has_checkpoint
        self._names = {t.name for t in families.tensors(model)}
        # Weights come whole: each worker takes its own part from memory that all of them see.
        self.parameters, self.num_ranks = families.parameters(model, 1), 1
        self.num_bytes = num_bytes(self.parameters, dtype)
        self._inbox = Inbox(self.parameters, dtype, name)
        self._quick = False
        self._places: dict[str, Place] = {}
        """Of the tensors that came by an update; the others are those of the checkpoint."""
        self._shown = _Shown(name, call)
        self._shadow: tuple[int, dict[str, Place]] | None = None

    async def begin(self, serving: int, version: int, offer: Offer) -> Berths:
        self._quick = is_quick(offer.transport, self.num_bytes)
        return await self._do(partial(self._inbox.begin, serving, version, offer))

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        arrays, report = await self._do(partial(self._inbox.receive, version, manifests))
        places = self._places | {name: ranks[0] for name, ranks in self._inbox.places(version, arrays).items()}
        in_use = {file for file, _, _ in (*places.values(), *self._places.values())}
        await self._shown.show(in_use.union(self._inbox.files()))
        missing = sorted(self._names - places.keys())
        if missing and not self._has_checkpoint:
            raise needs_all(self._name, missing)
        self._inbox.check(version)  # a rollback may have come meanwhile
        self._shadow = version, places
        return report

    async def _do(self, work: Callable[[], T]) -> T:
        """In a thread, unless that would take longer than the work."""
        return work() if self._quick else await asyncio.to_thread(work)

    def check_staged(self, version: int) -> None:
        if self._shadow is None or self._shadow[0] != version:
            raise not_staged(self._name, version)

    async def load(self, version: int) -> tuple[dict[str, int], float]:
        self.check_staged(version)
        assert self._shadow is not None
        places = self._shadow[1]
        drawn: dict[str, int] = (await self._call("slipstream_drawn"))[0]
        seconds = await self._load(places) if places != self._places else 0.0
        self._places, self._has_weights = places, True
        return drawn, seconds

    async def _load(self, places: Mapping[str, Place]) -> float:
        tensors = [[name, file, offset, list(shape)] for name, (file, offset, shape) in places.items()]
        return max(await self._call("slipstream_load", tensors, self._dtype))

    async def restore(self) -> None:
        """What serves is loaded anew. Without weights there is nothing to restore."""
        if self._has_weights:
            await self._load(self._places)

    def finish(self, version: int) -> None:
        self._drop(version)
        self._inbox.finish(version)

    async def rollback(self, version: int) -> None:
        self._drop(version)
        self._inbox.rollback(version)

    def _drop(self, version: int) -> None:
        if self._shadow is not None and self._shadow[0] == version:
            self._shadow = None

    async def checksums(self) -> tuple[ParameterChecksums, ...]:
        raise Unsupported(
            f"engine {self._name!r} cannot tell what it computes with: on CPU vLLM packs linear weights after loading them, "
            "and the packed form cannot be read back"
        )

    def dropped(self) -> None:
        self._places, self._has_weights, self._has_checkpoint = {}, False, False

    async def release(self) -> None:
        """What landed in shared memory is what serves."""

    @property
    def is_updating(self) -> bool:
        return self._inbox.is_updating

    def close(self) -> None:
        self._inbox.close()


class Direct(Reception):
    """`failed` are the live parameters that did not pass the proof, and why."""

    is_one_call = True
    transports: tuple[str, ...] = (*PLANES, "shm")

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        dtype: str,
        tp: int,
        call: Call,
        failed: Mapping[str, str],
        has_weights: bool,
    ) -> None:
        self._call, self._has_weights = call, has_weights
        self._failed = sorted(failed)
        self.parameters, self._reloaded = written_parameters(model, tp, failed)
        super().__init__(self.parameters, dtype, name)
        self.num_ranks = tp
        self.num_bytes = num_bytes(self.parameters, dtype)
        self._inbox = Inbox(self.parameters, dtype, name)
        """For weights that come through shared memory."""
        self._links: tuple[tuple[bytes, ...], ...] = ()
        self._shown = _Shown(name, call)
        self._places: dict[str, list[Place]] = {}
        """Of parameters that came through shared memory with the update under way."""
        self._staged = -1
        self._is_torn = False
        """A load was begun, and it is not known that it ended well, or that it changed nothing."""
        self._indices: list[list[int]] = []
        """Of the pieces that were staged, per rank."""
        self._said: tuple[Plan | None, list[list[bytes]], int] = None, [], 0
        """What they were by: the plan, and manifests without their versions. And how many bytes they are."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Berths:
        if offer.transport not in PLANES:
            if self._update is not None:
                self._admit(serving, version, offer)  # says why not
            berths = await asyncio.to_thread(self._inbox.begin, serving, version, offer)
            self._transport = offer.transport
            return berths
        if self._inbox.is_updating:
            self._inbox.begin(serving, version, offer)  # says why not
        with self._lock:
            plan = self._admit(serving, version, offer)
            self._update = Update(version, plan, hashed=False)
        try:
            if offer.fresh or plan is not self._plan or offer.transport != self._transport or not self._links:
                links = await self._call("slipstream_open", offer.transport, plan.to_bytes(), self._failed)
                self._links = tuple(tuple(map(bytes, rank)) for rank in links)
            if offer.transport == "nccl":  # the others come when they come
                await self._call("slipstream_expect", version)
        except BaseException:
            self._update = None
            raise
        self._plan, self._transport = plan, offer.transport
        return Berths(self._links, b"")

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        if self._inbox.is_updating:
            arrays, report = await asyncio.to_thread(self._inbox.receive, version, manifests)
            self._check_complete(arrays)
            self._places = self._inbox.places(version, arrays)
            files = {file for places in self._places.values() for file, _, _ in places}.union(self._inbox.files())
            await self._shown.show(files)
            self._inbox.check(version)
            self._staged = version
            return report
        start, receive_seconds = time.perf_counter(), 0.0
        with self._lock:
            update = self._current(version)
        num_bytes = self._look_at(update, manifests)
        # Over `cuda` the trainer has each rank's own word already. Over `nccl` a rank waits for it, even if nothing comes.
        if self._transport == "nccl":
            try:
                # Little by little, so that steps run meanwhile, and a rollback is heeded.
                while None in (came := await self._call("slipstream_stage", version, self._indices, PATIENCE_SECONDS)):
                    self.check(version)
                receive_seconds = max(came)
            except SlipstreamError:
                raise
            except Exception as error:
                raise TransferError(
                    f"engine {self._name!r}: version {version} did not arrive: {_last_line(error)}"
                ) from None
        self.check(version)  # a rollback may have come meanwhile
        self._staged = version
        return StageReport(num_bytes, time.perf_counter() - start, receive_seconds)

    def _look_at(self, update: Update, manifests: Sequence[Sequence[bytes]]) -> int:
        """What is to come: bytes. Usually the same as last time."""
        said = update.plan, [[without_version(m, update.version) for m in of_rank] for of_rank in manifests]
        if not self._has_weights or said != self._said[:2]:
            sums, sent, num_bytes = self._manifests(update, manifests, self.num_ranks)
            self._check_whole(update, sent)
            self._check_complete(sent)
            self._indices = [sorted(indices) for indices in sums]
            self._said = *said, num_bytes
        return self._said[2]

    def _check_complete(self, sent: Mapping[str, Any]) -> None:
        if not self._has_weights and (missing := sorted({p.name for p in self.parameters} - sent.keys())):
            raise needs_all(self._name, missing)

    def check_staged(self, version: int) -> None:
        if self._staged != version:
            raise not_staged(self._name, version)

    async def load(self, version: int) -> tuple[dict[str, int], float]:
        self.check_staged(version)
        self._is_torn = True
        if self._inbox.is_updating:
            places = [
                [name, [[file, offset, list(shape)] for file, offset, shape in at]] for name, at in self._places.items()
            ]
            answers = await self._call("slipstream_write", places, self._dtype, sorted(self._reloaded))
        else:
            answers = await self._call("slipstream_apply", version, self._indices, PATIENCE_SECONDS)
        self._is_torn = any(why == "" for _, _, why, _ in answers)
        seconds = max(spent for _, spent, _, _ in answers)
        if refusals := [why for _, _, why, _ in answers if why]:
            if all(later for *_, later in answers):
                raise NotHere(refusals[0], seconds)
            raise TransferError(refusals[0])
        self._has_weights, self._is_torn = True, False
        return answers[0][0], seconds

    async def restore(self) -> None:
        """There is no second copy. All that can be checked was checked when the version was staged; what is left is a device
        that fails, and it serves nobody any more."""
        if self._has_weights and self._is_torn:
            raise EngineFailure("the old weights were overwritten in part, and there is no copy of them")

    def finish(self, version: int) -> None:
        self._staged, self._places = -1, {}
        if self._inbox.is_updating:
            return self._inbox.finish(version)
        with self._lock:
            self._current(version)
            self._update = None

    async def rollback(self, version: int) -> None:
        if self._staged == version:
            self._staged, self._places = -1, {}
        self._inbox.rollback(version)
        if self._update is not None and self._update.version == version:
            self._update, self._links = None, ()
            try:
                await self._call("slipstream_forget")
            except Exception as error:
                log.warning("engine %s: rolling back version %d: %s", self._name, version, error)

    async def checksums(self) -> tuple[ParameterChecksums, ...]:
        """A few parameters at a time, so that steps run meanwhile. Those that vLLM's own loader fills it also arranges, and
        they cannot be read as tensors."""
        sums: dict[tuple[str, int], tuple[int, ...]] = {}
        for names in self._groups():
            for rank, answer in enumerate(await self._call("slipstream_checksums", names)):
                sums |= {(name, rank): tuple(parts) for name, parts in answer}
        return tuple(ParameterChecksums(p.name, p.rank, sums.get((p.name, p.rank), ())) for p in self.parameters)

    def _groups(self) -> list[list[str]]:
        """Names of what can be read, as many at a time as make `HASHED_BYTES` on a rank, and at least one."""
        groups: list[list[str]] = []
        room = 0
        for name, size in {p.name: num_bytes([p], self._dtype) for p in self.parameters}.items():
            if name in self._reloaded:
                continue
            if not groups or size > room:
                groups.append([])
                room = HASHED_BYTES
            groups[-1].append(name)
            room -= size
        return groups

    def dropped(self) -> None:
        self._has_weights = False

    async def release(self) -> None:
        if self._links and self._update is None:
            self._links = ()
            await self._call("slipstream_close")

    @property
    def is_updating(self) -> bool:
        return self._update is not None or self._inbox.is_updating

    def close(self) -> None:
        self._inbox.close()


class _Shown:
    """The files of shared memory that the workers see."""

    def __init__(self, name: str, call: Call) -> None:
        self._name, self._call = name, call
        self._files: set[str] = set()

    async def show(self, files: set[str]) -> None:
        """Workers see what is in these, and forget others."""
        if files == self._files:
            return
        try:
            await self._call("slipstream_map", sorted(files))
        except SlipstreamError:
            raise
        except Exception as error:
            raise EngineFailure(
                f"engine {self._name!r} failed mapping the memory in which weights land: {type(error).__name__}: {error}"
            ) from None
        self._files = files


def needs_all(name: str, missing: Sequence[str]) -> FleetChanged:
    return FleetChanged(
        f"engine {name!r} has no weights of its own and needs every tensor; {missing[0]} and {len(missing) - 1} more did "
        "not come"
    )


def _last_line(error: Exception) -> str:
    """A worker's error comes with its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
