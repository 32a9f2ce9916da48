"""The LoRA adapters of a vLLM engine: which slot of vLLM's workers each has, and how an update gets there.

A slot keeps its number, and thus vLLM's id of an adapter, from update to update. vLLM's prefix cache is keyed by the adapter's
name, and by a salt that changes with its weights (`samples.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.engines.frontend.checks import check_adapters, unknown_adapter, weights_dropped
from slipstream.engines.vllm import compat
from slipstream.engines.vllm.weight_loading import CallWorkers, Place
from slipstream.errors import ConfigError, EngineFailure, Unsupported
from slipstream.types import AdapterSupport, EngineInfo, Lora, Offer


class VllmAdapters:
    """`support` is None for an engine without adapters. Of an update, `stage` copies the adapters into host memory of the
    workers, and `load` moves them into their slots between two steps."""

    def __init__(self, engine: str, support: AdapterSupport | None, dtype: str, call_workers: CallWorkers) -> None:
        self._engine, self.support, self._dtype, self._call_workers = engine, support, dtype, call_workers
        self._slots: dict[str, int] = {}
        """By name, from 1."""
        self._staged: dict[str, int] = {}

    async def install(self) -> None:
        """Make the slots in the workers. Raise `ConfigError` if vLLM computes no adapters of some targets."""
        if self.support is None:
            return
        for known in await self._call_workers("slipstream_install_adapters", self.support.slots):
            if unknown := set(self.support.targets) - set(known):
                raise ConfigError(
                    f"vLLM computes no adapters of {', '.join(sorted(unknown))} for this model, but of {', '.join(known)}; "
                    "name those in adapters.targets"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def request(self, name: str) -> Any:
        """Return what tells vLLM to compute with this adapter; None for the base model. Raise `UnknownAdapter`."""
        if not name:
            return None
        if name not in self._slots:
            raise unknown_adapter(self._engine, name, self.names)
        return compat.lora_request(name, self._slots[name])

    def check(self, info: EngineInfo, offer: Offer, weights_asleep: int) -> None:
        """Raise unless the adapters of an update can be taken. `weights_asleep` is the level at which the base model sleeps."""
        check_adapters(info, offer, self.names)
        if offer.transport != "shm":
            raise Unsupported(f"engine {self._engine!r} takes adapters over shm only, offered is {offer.transport}")
        if offer.only_adapters and weights_asleep == 2:
            raise weights_dropped(self._engine)

    async def stage(self, brought: Mapping[Lora, Mapping[str, Place]]) -> None:
        """Make the workers copy adapters out of the files of shared memory that they have mapped."""
        self._staged = {}
        if not brought or self.support is None:
            return
        free = sorted(set(range(1, self.support.slots + 1)) - set(self._slots.values()), reverse=True)
        staged = {lora.name: self._slots[lora.name] if lora.name in self._slots else free.pop() for lora in brought}
        adapters = [
            [
                staged[lora.name],
                lora.rank,
                lora.alpha,
                lora.targets,
                [[name, *place] for name, place in tensors.items()],
            ]
            for lora, tensors in brought.items()
        ]
        self._check(await self._call_workers("slipstream_stage_adapters", adapters, self._dtype))
        self._staged = staged

    @property
    def is_staged(self) -> bool:
        return bool(self._staged)

    async def load(self) -> float:
        """Make the workers compute with what is staged. Return the seconds they spent. Stepping is stopped."""
        if not self._staged:
            return 0.0
        answers = await self._call_workers("slipstream_swap_adapters")
        self._check([reason for _, reason in answers])
        return max(seconds for seconds, _ in answers)

    def _check(self, reasons: list[str]) -> None:
        for rank, reason in enumerate(reasons):
            if reason:
                raise EngineFailure(f"rank {rank} could not load adapters: {reason}")

    async def undo(self) -> None:
        """Bring back what `load` has replaced, on all workers."""
        if self._staged:
            await self._call_workers("slipstream_undo_adapters")

    def committed(self) -> None:
        """Serve what `load` has loaded, now that the base model is, too."""
        self._slots |= self._staged
        self._staged = {}

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged = {}

    def unload(self, name: str) -> None:
        """Free a slot. The workers keep its contents until another adapter takes it; no request names it."""
        self._slots.pop(name, None)
