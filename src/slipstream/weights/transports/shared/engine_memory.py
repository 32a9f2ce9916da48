"""`shared-engine`: the weights lie in an engine's own GPU memory, and a trainer on the same GPU writes them there.

    link = GPU uuid, CUDA IPC handles of the allocations, and the place of each of the engine's parameters in them

This is the way to share weights with vLLM: its CUDA graphs use the addresses at which it has loaded them. The engine sends the
link at the beginning of each update, and stands still until its end. The memory is gone when the engine is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import TransferError, Unsupported
from slipstream.tensors.boxes import contiguous_start, shape_of
from slipstream.tensors.dlpack import DLPackView
from slipstream.types import Parameter
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.cuda.driver import CudaDriver, NotExportable, Region
from slipstream.weights.transports.shared.cuda_memory import address_range, download
from slipstream.weights.transports.shared.host_memory import ENGINE_NAME


def export_parameters(parameters: Mapping[str, Any], driver: CudaDriver) -> bytes:
    """Return the link to an engine's parameters, which are torch tensors. Raise `NotExportable`."""
    regions: dict[Region, bytes] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, tensor in parameters.items():
        region = driver.region(tensor.data_ptr())
        if region not in regions:
            exported = driver.export(region)
            if isinstance(exported, int):
                os.close(exported)
                raise NotExportable(f"{name} is not in memory of PyTorch's own allocator")
            regions[region] = exported
        offset = tensor.data_ptr() - region.base
        if not tensor.is_contiguous() or offset + tensor.nbytes > region.size:
            raise NotExportable(f"{name} is not contiguous, or in several allocations (expandable_segments)")
        places[name] = list(regions).index(region), offset
    device = driver.device_uuid(next(iter(regions)).device)
    handles = [[handle.hex(), region.size] for region, handle in regions.items()]
    return pack_link(ENGINE_NAME, device=device, regions=handles, parameters=places)


class EngineMemory:
    """The trainer's half: an engine's parameters, as the tensors of the checkpoint that they consist of. `views` give only
    addresses and must not be read."""

    def __init__(
        self, link: bytes, parameters: Sequence[Parameter], dtype: str, device: int, driver: CudaDriver
    ) -> None:
        fields = unpack_link(link)
        self._driver, self._device = driver, device
        if (index := driver.device_index(link_field(fields, "device", str))) != device:
            raise Unsupported(
                f"the engine is on GPU {index} of this process, the module on GPU {device}; move the module"
            )
        memory = []
        for handle, size in link_field(fields, "regions", list):
            base = driver.map(bytes.fromhex(handle), size)
            memory.append(address_range(base, size, partial(driver.unmap, base, size), driver))
        places, kind = link_field(fields, "parameters", dict), numpy_dtype(dtype)
        self.views: dict[str, np.ndarray] = {}
        for parameter in parameters:
            if parameter.name not in places:
                raise TransferError(f"the engine has not said where its parameter {parameter.name} lies")
            number, offset = places[parameter.name]
            for part in parameter.parts:
                start = contiguous_start(part.local_box, parameter.shape)
                if start is None:
                    raise Unsupported(f"{part.tensor} is not contiguous in the engine's {parameter.name}")
                shape = shape_of(part.tensor_box)
                first = offset + start * kind.itemsize
                data = memory[number][first : first + int(np.prod(shape)) * kind.itemsize]
                self.views[part.tensor] = data.view(kind).reshape(shape)

    def array(self, view: np.ndarray) -> DLPackView:
        return DLPackView(view, self._driver.device_type, self._device)

    def write(self, view: np.ndarray, values: np.ndarray) -> None:
        self._driver.upload(view.ctypes.data, np.ascontiguousarray(values, view.dtype))

    def read(self, view: np.ndarray) -> np.ndarray:
        return download(self._driver, view)

    def synchronize(self) -> None:
        self._driver.synchronize()

    def close(self) -> None:
        """The module keeps the memory mapped while it uses it."""
