"""PyTorch trainers: a module's weights to the engines, as a copy, or as one copy for both.

    update_weights(bridge, module)             a copy, by `bridge.sync`: any engine, on any host

    shared = share_weights(bridge, module)     no copy: the module's parameters are the memory that engines serve from
    with shared.updating():                    engines stand still
        optimizer.step()
                                               the next version serves

Names are those of the Hugging Face checkpoint, as `transformers` models have them, also inside DDP or torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from slipstream.bridge import Bridge
from slipstream.errors import MappingError, Unsupported, VersionError
from slipstream.shared import SharedWeights
from slipstream.types import InFlight, SyncReport
from slipstream.weights.dlpack import Foreign
from slipstream.weights.source import named_tensors

_WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before names."""


def update_weights(
    bridge: Bridge,
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    in_flight: InFlight = "keep",
    partial: bool = False,
) -> SyncReport:
    """Makes a module's parameters, or a state dict, the policy of every engine. See `Bridge.sync`."""
    named = dict(weights.named_parameters()) if isinstance(weights, torch.nn.Module) else weights
    tensors = {_plain(name): tensor.detach() for name, tensor in named.items()}
    return bridge.sync(tensors, in_flight=in_flight, partial=partial)


def share_weights(
    bridge: Bridge, module: torch.nn.Module, weights: str | Path | Mapping[str, torch.Tensor] | None = None
) -> SharedModule:
    """Moves a module's parameters into memory that the engines serve from, and makes them the next version. Optimisers keep
    the parameters that they have: only where the values lie changes.

    `weights` (a directory of safetensors, or a state dict) gives other values than the module's own. With parameters on the
    `meta` device there is then never a second copy of the model, not even while it is loaded.

    The module must be where the engines are, on the CPU or on their GPU, in their dtype; see `Bridge.share`."""
    parameters = {_plain(name): parameter for name, parameter in module.named_parameters()}
    device = _device_of(module, has_weights=weights is not None)
    tensors = named_tensors({n: p.detach() for n, p in parameters.items()} if weights is None else weights)
    if strangers := sorted(tensors.keys() ^ parameters.keys()):
        raise MappingError(
            f"{strangers[0]} and {len(strangers) - 1} more are not both in the module and in the weights for it. (A head "
            "that is tied to the embedding must be the same parameter: module.tie_weights())"
        )
    return SharedModule(module, parameters, bridge.share(tensors, device.index or 0), device)


class SharedModule:
    """Made by `share_weights`: a module whose parameters are the engines' own memory. Used by one thread.

    Forward and backward passes run at any time; the parameters are written to while the engines are held: inside `updating`, or
    between `hold` and `notify_update`. A step of an optimiser elsewhere is noticed by PyTorch's count of in-place changes, and
    refused at the next `hold`. (Writing to `parameter.data` is not counted.)"""

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
                    f"the engines serve from memory on {tensor.device}, and {name} is on {parameters[name].device}: move the "
                    "module there before it is shared, or start engines where it is"
                )
            _lay(parameters[name], tensor)
        self._changes = self._count()

    @property
    def version(self) -> int:
        """That the engines serve."""
        return self._shared.version

    @property
    def report(self) -> SyncReport | None:
        """Of the last update."""
        return self._shared.report

    def hold(self) -> None:
        """Once this returns, no engine runs a step until `notify_update` or `release`: the parameters may be written to."""
        self._check_places()
        self._check_unwritten()
        self._shared.hold()

    def notify_update(self, in_flight: InFlight = "keep") -> SyncReport:
        """What the parameters hold now is the next version: engines forget what older ones have cached, and go on. Completions
        name it from their next token on."""
        self._check_places()
        report = self._shared.notify_update(in_flight)
        self._changes = self._count()
        return report

    def release(self) -> None:
        """Gives an update up after `hold`: what the parameters hold is no version, and engines have no policy until there is
        one."""
        self._shared.release()
        self._changes = self._count()

    @contextlib.contextmanager
    def updating(self, in_flight: InFlight = "keep") -> Iterator[SharedModule]:
        """`hold`, and `notify_update` at the end of the block, or `release` if it raises: nobody knows how far it came."""
        self._check_places()
        self._check_unwritten()
        try:
            with self._shared.updating(in_flight):
                yield self
                self._check_places()
        finally:
            self._changes = self._count()

    def close(self) -> None:
        """Engines that come later cannot join. The module, and the engines that serve from its memory, go on."""
        self._shared.close()

    def _count(self) -> dict[str, int]:
        """In-place changes, as PyTorch counts them."""
        return {name: parameter._version for name, parameter in self._parameters.items()}

    def _check_unwritten(self) -> None:
        for name, count in self._count().items():
            if count != self._changes[name]:
                raise VersionError(
                    f"{name} was written to while engines could read it: what they have generated since version {self.version} "
                    "may come from a mix of old and new weights. Put optimizer.step() inside `with shared.updating():`, and go "
                    "on with share_weights anew"
                )

    def _check_places(self) -> None:
        for name, place in self._places.items():
            if self._parameters[name].data_ptr() != place:
                raise MappingError(
                    f"{name} has got memory of its own, which engines do not see (by module.to(), a cast, or load_state_dict("
                    "assign=True)?): keep the parameters where they are, or call share_weights anew"
                )


def _plain(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _device_of(module: torch.nn.Module, has_weights: bool) -> torch.device:
    """On which everything is, but for parameters that will get their values."""
    found: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and not (has_weights and isinstance(tensor, torch.nn.Parameter)):
            raise Unsupported(
                f"{name} is on the meta device and has no value: pass weights= for parameters, and make buffers on the CPU, as "
                "accelerate's init_empty_weights does"
            )
        if not tensor.is_meta:
            found.setdefault(tensor.device, name)
    if len(found) > 1:
        (one, name), (other, stranger), *_ = found.items()
        raise Unsupported(f"{name} is on {one}, {stranger} on {other}: weights are shared on one device")
    return next(iter(found), torch.device("cpu"))


def _tensor_over(array: np.ndarray | Foreign) -> torch.Tensor:
    """A tensor whose values are the array's memory."""
    return torch.from_dlpack(array if isinstance(array, Foreign) else Foreign(array))


def _lay(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """The parameter's values are the tensor's memory from now on."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))
    else:
        parameter.data = tensor
