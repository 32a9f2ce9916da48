"""vLLM's own loader, with a way back.

It loads layer by layer: it sets a layer's parameters aside, loads and processes new ones, and copies these into the memory of
the old ones, which kernels and CUDA graphs go on using. If it fails, some layers are new, one is half loaded, and the others
have no parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from slipstream.errors import TransferError

SPARE_BYTES = 1 << 30
"""Device memory that a copy of the parameters must leave free."""

Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]
"""Whole tensors under their Hugging Face names. The loader leaves layers of which it gets no tensor as they are."""


class NothingWritten(TransferError):
    """A version cannot be applied; the live parameters are unchanged."""


class UndoableReload:
    """Loads weights and keeps a copy of the old parameters until `settle`: on the device if there is room, else in pinned host
    memory, which is then kept for the next time."""

    def __init__(self, model: torch.nn.Module, load: Callable[[Weights], None], device: torch.device) -> None:
        self._model, self._load, self._device = model, load, device
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Live tensors and their copies."""
        self._host: list[torch.Tensor] = []

    def __call__(self, weights: Weights) -> None:
        """Load these weights, or raise `NothingWritten`."""
        self._save()
        try:
            self._load(weights)
        except Exception as error:
            self.undo()
            raise NothingWritten(f"vLLM's loader failed: {type(error).__name__}: {error}") from error

    def _save(self) -> None:
        live = {t.data_ptr(): t.data for t in (*self._model.parameters(), *self._model.buffers())}.values()
        if self._has_room(sum(tensor.nbytes for tensor in live)):
            self._saved = [(tensor, tensor.clone()) for tensor in live]
            return
        if not self._host:
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in live]
        for tensor, copy in zip(live, self._host, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        self._saved = list(zip(live, self._host, strict=True))

    def _has_room(self, size: int) -> bool:
        return self._device.type != "cuda" or torch.cuda.mem_get_info(self._device)[0] > size + SPARE_BYTES

    def undo(self) -> None:
        """Bring back the parameters that the last load replaced, if it is not settled."""
        for tensor, copy in self._saved:
            tensor.copy_(copy, non_blocking=True)
        self.settle()

    def settle(self) -> None:
        self._saved = []


def abandon(model: torch.nn.Module) -> None:
    """Put back the parameters that vLLM's loader has set aside, after it failed. Those of layers that it had finished keep
    their new values. Without this the next load would begin with what it has buffered of the failed one."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            for tensor in layerwise.get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def pack_tied(model: torch.nn.Module) -> None:
    """On CPU, repack a head that is tied to the embedding: it loads no weight, so vLLM would keep the packed copy of the old
    one."""
    seen: set[int] = set()
    for module in model.modules():
        if (weight := getattr(module, "weight", None)) is None:
            continue
        if id(weight) in seen and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        seen.add(id(weight))


def reset_scales(model: torch.nn.Module) -> None:
    """Set the scales of attention layers to 1, as they are without a checkpoint's. vLLM's dummy loader fills them with noise,
    and if its KV cache is not quantized, no later load sets them."""
    for name, scale in model.named_buffers():
        if name.endswith(("._q_scale", "._k_scale", "._v_scale", "._prob_scale")):
            scale.fill_(1.0)
