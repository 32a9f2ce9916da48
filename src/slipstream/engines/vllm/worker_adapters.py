"""LoRA adapters in one of vLLM's workers.

vLLM's manager has an adapter in each slot from the start, at first one that changes nothing, and none is ever removed. So vLLM
never looks for an adapter's files, evicts none, and a slot's matrices stay where kernels and CUDA graphs read them: an update
overwrites them between two steps. vLLM keeps each adapter in host memory, too, which brings it back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from slipstream.engines.vllm import compat


class WorkerAdapters:
    """Slots are numbered from 1, as vLLM's ids of adapters are."""

    def __init__(self, runner: Any, num_slots: int) -> None:
        vllm = runner.lora_manager
        self._manager, self._dtype = vllm._adapter_manager, vllm.lora_config.lora_dtype
        self._mapper = compat.rename_mapper(runner.get_model())
        self._manager.remove_all_adapters()
        for slot in range(1, num_slots + 1):
            vllm.add_dummy_lora(compat.lora_request("empty", slot), rank=1)
            self._manager.activate_adapter(slot)
        self._models: dict[int, LoRAModel] = dict(sorted(self._manager.list_adapters().items()))
        """By slot, in order: what each computes with, in host memory."""
        self._staged: dict[int, LoRAModel] = {}
        self._replaced: dict[int, LoRAModel] = {}

    @property
    def targets(self) -> list[str]:
        """The projections that vLLM computes adapters of."""
        names = {
            name for module in self._manager.modules for name in self._manager.packed_modules.get(module, [module])
        }
        return sorted({name.rpartition(".")[2] for name in names})

    def stage(
        self, slot: int, rank: int, alpha: float, targets: Sequence[str], named: Mapping[str, torch.Tensor]
    ) -> None:
        """Prepare an adapter for a slot. Its tensors are copied."""
        helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": alpha, "target_modules": list(targets)})
        # vLLM multiplies the scale into them in place.
        copies = {name: tensor.clone() for name, tensor in named.items()}
        self._staged[slot] = LoRAModel.from_lora_tensors(
            slot, copies, helper, device="cpu", dtype=self._dtype, weights_mapper=self._mapper
        )

    def drop_staged(self) -> None:
        self._staged, self._replaced = {}, {}

    def swap(self) -> None:
        """Use the staged adapters from the next step on."""
        self._replaced = {slot: self._models[slot] for slot in self._staged}
        self._use(self._staged)
        self._staged = {}

    def undo(self) -> None:
        """Bring back what the last `swap` has replaced, whether or not it succeeded."""
        self._use(self._replaced)
        self._replaced = {}

    def restore(self) -> None:
        """Write all adapters again, after vLLM has removed them or their memory was lost."""
        self._manager.remove_all_adapters()
        self._manager._last_mapping = None  # its buffers on the device, too, may be lost
        self._use(self._models)

    def _use(self, models: Mapping[int, LoRAModel]) -> None:
        """vLLM puts an adapter into the first free slot: its own, as those before are taken."""
        for slot, model in models.items():
            self._models[slot] = model
            self._manager.remove_adapter(slot)
            self._manager.add_adapter(model)
            self._manager.activate_adapter(slot)


class AdapterExtension:
    """The part of `WorkerExtension` that concerns adapters."""

    model_runner: Any
    _slipstream_adapters: WorkerAdapters | None
    _slipstream_mapped: Callable[[Sequence[Sequence[Any]], torch.dtype], Iterator[tuple[str, torch.Tensor]]]

    def slipstream_install_adapters(self, num_slots: int) -> list[str]:
        """Make slots for adapters; called once, after `slipstream_install`. Return the projections that they may change."""
        self._slipstream_adapters = WorkerAdapters(self.model_runner, num_slots)
        return self._slipstream_adapters.targets

    def slipstream_stage_adapters(self, adapters: Sequence[Sequence[Any]], dtype: str) -> str:
        """Prepare these adapters, `(slot, rank, alpha, targets, tensors)`, with whole tensors in mapped files as in
        `slipstream_reload`. Drops what was staged before. Return why it failed, or ""."""
        assert self._slipstream_adapters is not None
        self._slipstream_adapters.drop_staged()
        try:
            for slot, rank, alpha, targets, tensors in adapters:
                named = dict(self._slipstream_mapped(tensors, getattr(torch, dtype)))
                self._slipstream_adapters.stage(slot, rank, alpha, targets, named)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def slipstream_swap_adapters(self) -> tuple[float, str]:
        """Use what is staged. Return the seconds it took, and why it failed, or "". It does not raise: vLLM would not wait for
        the other workers then."""
        assert self._slipstream_adapters is not None
        start, reason = time.perf_counter(), ""
        try:
            self._slipstream_adapters.swap()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        return time.perf_counter() - start, reason

    def slipstream_undo_adapters(self) -> None:
        """Bring back what the last swap has replaced: another worker, or the base model, could not be swapped."""
        assert self._slipstream_adapters is not None
        self._slipstream_adapters.undo()


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Take vLLM's wrappers off the layers that adapters change, so that parameters have their usual names. vLLM 0.26 cannot
    load weights with them."""
    modules = list(model.named_modules(remove_duplicate=False))
    wrapped = [(name, module) for name, module in modules if isinstance(module, BaseLayerWithLoRA)]
    try:
        for name, module in wrapped:
            _replace(model, name, module.base_layer)
        yield
    finally:
        for name, module in wrapped:
            _replace(model, name, module)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
