"""PyTorch trainers: copy a module's weights to the engines, or share memory with them.

    update_weights(bridge, module)             copies, by `bridge.sync`: any engine, on any host

    shared = share_weights(bridge, module)     no copy: the engines serve from the memory of the module's parameters
    with shared.updating():                    engines pause
        optimizer.step()
                                               engines continue with the next version

Parameters have the names of the HF checkpoint, as in `transformers`; prefixes of DDP and torch.compile are removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.shared_weights import SharedWeights
from slipstream.errors import MappingError, Unsupported, VersionError
from slipstream.model.checkpoints.served_model import as_stored
from slipstream.tensors.dlpack import DLPackView
from slipstream.types import InFlight, SyncReport
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.sources.torch_shards import replicated

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""


def update_weights(
    bridge: Bridge,
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    in_flight: InFlight = "keep",
    partial: bool = False,
) -> SyncReport:
    """Copy a module's parameters, or a state dict, to every engine. See `Bridge.sync`."""
    if isinstance(weights, torch.nn.Module):
        tensors = stored_parameters(weights)
    else:
        tensors = {_without_wrappers(name): tensor.detach() for name, tensor in weights.items()}
    params = replicated(tensors, bridge.process_count) if bridge.process_count > 1 else tensors
    return bridge.sync(params, in_flight=in_flight, partial=partial)


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a module's parameters by their names without those of wrappers."""
    return {_without_wrappers(name): parameter for name, parameter in module.named_parameters()}


def stored_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters under the names, and in the shapes, of its checkpoint."""
    return as_stored(_unwrapped(module), {name: p.detach() for name, p in named_parameters(module).items()})


def share_weights(
    bridge: Bridge, module: torch.nn.Module, weights: str | Path | Mapping[str, torch.Tensor] | None = None
) -> SharedModule:
    """Move a module's parameters into memory that the engines serve from, and make them the next version.

    The `Parameter` objects stay the same, so optimizers remain valid; only the location of their values changes. `weights` (a
    directory of safetensors, or a state dict) replaces the module's values. With parameters on the `meta` device there is then
    never a second copy of the model, not even while loading.

    The module must be on the engines' device, the CPU or their GPU, in their dtype; see `Bridge.share`."""
    parameters = named_parameters(module)
    device = _device_of(module, has_weights=weights is not None)
    tensors = named_tensors({n: p.detach() for n, p in parameters.items()} if weights is None else weights)
    if unmatched := sorted(tensors.keys() ^ parameters.keys()):
        raise MappingError(
            f"module and weights must have the same parameters; {unmatched[0]} and {len(unmatched) - 1} more are only in one "
            "of them (a head tied to the embedding must be the same parameter: module.tie_weights())"
        )
    return SharedModule(module, parameters, bridge.share(tensors, device.index or 0), device)


class SharedModule:
    """A module whose parameters are the engines' memory; made by `share_weights`. Not thread-safe.

    Forward and backward passes may run at any time. Parameters may be written only while the engines are held: inside
    `updating`, or between `hold` and `notify_update`. Other in-place changes are detected by PyTorch's version counters and
    refused at the next `hold`, except writes to `parameter.data`, which are not counted."""

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: SharedWeights,
        device: torch.device,
    ) -> None:
        self.module, self._parameters, self._shared = module, parameters, shared
        tensors = {name: _tensor_over(array) for name, array in shared.arrays.items()}
        self._places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor.device.type != device.type:
                raise Unsupported(
                    f"the engines serve from memory on {tensor.device}, but {name} is on {parameters[name].device}; move the "
                    "module there before sharing it, or start engines on its device"
                )
            _rebind(parameters[name], tensor)
        self._changes = self._count()

    @property
    def version(self) -> int:
        """Policy version that the engines serve."""
        return self._shared.version

    @property
    def report(self) -> SyncReport | None:
        """Report of the last update."""
        return self._shared.report

    def hold(self) -> None:
        """Pause all engines until `notify_update` or `release`, so that parameters may be written."""
        self._check_places()
        self._check_unwritten()
        self._shared.hold()

    def notify_update(self, in_flight: InFlight = "keep") -> SyncReport:
        """Make the current parameters the next version and resume the engines. Engines drop caches of older versions, and
        report the new version from the next token on."""
        try:
            self._check_places()
        except MappingError:
            self.release()
            raise
        report = self._shared.notify_update(in_flight)
        self._changes = self._count()
        return report

    def release(self) -> None:
        """Abandon an update after `hold`. The parameters are not a version, so engines have no policy until the next update."""
        self._shared.release()
        self._changes = self._count()

    @contextlib.contextmanager
    def updating(self, in_flight: InFlight = "keep") -> Iterator[SharedModule]:
        """Call `hold`, then `notify_update` at the end of the block, or `release` if it raises, perhaps halfway."""
        self._check_places()
        self._check_unwritten()
        try:
            with self._shared.updating(in_flight):
                yield self
                self._check_places()
        finally:
            self._changes = self._count()

    def close(self) -> None:
        """Stop sharing with new engines. The module and the engines that already share its memory are not affected."""
        self._shared.close()

    def _count(self) -> dict[str, int]:
        """Return PyTorch's version counter of every parameter."""
        return {name: parameter._version for name, parameter in self._parameters.items()}

    def _check_unwritten(self) -> None:
        for name, count in self._count().items():
            if count != self._changes[name]:
                raise VersionError(
                    f"{name} was written to while engines could read it, so completions since version {self.version} may come "
                    "from a mix of old and new weights. Put optimizer.step() inside `with shared.updating():`, and call "
                    "share_weights again"
                )

    def _check_places(self) -> None:
        for name, place in self._places.items():
            if self._parameters[name].data_ptr() != place:
                raise MappingError(
                    f"{name} was moved to memory that engines do not share (by module.to(), a cast, or load_state_dict("
                    "assign=True)?); keep parameters in place, or call share_weights again"
                )


def _without_wrappers(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _unwrapped(module: Any) -> Any:
    """Return what DistributedDataParallel and torch.compile wrap."""
    for wrapper in _WRAPPERS:
        if isinstance(inner := getattr(module, wrapper.removesuffix("."), None), torch.nn.Module):
            return _unwrapped(inner)
    return module


def _device_of(module: torch.nn.Module, has_weights: bool) -> torch.device:
    """Return the device of all parameters and buffers, ignoring meta parameters that will get values."""
    devices: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and not (has_weights and isinstance(tensor, torch.nn.Parameter)):
            raise Unsupported(
                f"{name} is on the meta device and has no value; pass weights= for parameters, and create buffers on the CPU, "
                "as accelerate's init_empty_weights does"
            )
        if not tensor.is_meta:
            devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        (first, name), (second, other), *_ = devices.items()
        raise Unsupported(f"{name} is on {first} and {other} on {second}; shared weights must be on one device")
    return next(iter(devices), torch.device("cpu"))


def _tensor_over(array: np.ndarray | DLPackView) -> torch.Tensor:
    """Return a tensor over the array's memory."""
    return torch.from_dlpack(array if isinstance(array, DLPackView) else DLPackView(array))


def _rebind(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Make the tensor's memory that of the parameter."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))
    else:
        parameter.data = tensor
