"""A trainer that writes an engine's own memory: vLLM's fused parameters as the tensors of the checkpoint, with a fake driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import TransferError, Unsupported
from slipstream.model import families
from slipstream.model.families.vllm_parameters import vllm_parameters
from slipstream.types import CommitReport, Destinations, EngineInfo, StageReport, UpdateReports
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.transports.cuda.driver import NotExportable
from slipstream.weights.transports.shared.engine_memory import EngineMemory, export_parameters
from slipstream.weights.transports.shared.host_memory import ENGINE_NAME
from slipstream.weights.update import shared
from slipstream.weights.update.shared import Sharing
from slipstream.weights.update.transport_choice import host_identity
from tests.tiny import random_params, tiny_config
from tests.weights.memfd import HostMemory, Memfd
from tests.weights.test_cuda import assert_bits, naive

CONFIG = tiny_config("mixtral", tie_word_embeddings=True, vocab_size=70)  # fused, padded, and with stacked experts
PARAMETERS = vllm_parameters(CONFIG, 1)


def live_parameters(driver: Memfd) -> dict[str, torch.Tensor]:
    """The parameters of a vLLM worker, in two allocations, filled with NaN."""
    regions, starts, found = [driver.allocate(1 << 20) for _ in range(2)], [0, 0], {}
    for number, parameter in enumerate(PARAMETERS):
        region, start = regions[number % 2], starts[number % 2]
        view = HostMemory(region.base, region.size).view("float32", _row_major(parameter.shape), start)
        view[...] = np.nan
        found[parameter.name] = torch.from_numpy(view)
        starts[number % 2] += -(-view.nbytes // 64) * 64
    return found


def _row_major(shape: Any) -> Any:
    from slipstream.tensors.strided import Strided

    return Strided.row_major(shape)


def weights(seed: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in named_tensors(random_params(CONFIG, seed)).items()}


def test_each_tensor_is_a_view_of_the_fused_parameter_that_holds_it() -> None:
    driver = Memfd(handles=True)
    live = live_parameters(driver)
    memory = EngineMemory(export_parameters(live, driver), PARAMETERS, "float32", 0, driver)
    values = weights(0)
    assert memory.views.keys() == values.keys()
    for name, view in memory.views.items():
        memory.write(view, values[name])
        np.testing.assert_array_equal(memory.read(view), values[name])
    assert_bits(live, naive(CONFIG, values, 1, 0, torch.float32))
    name = "model.layers.1.self_attn.k_proj.weight"
    torch.from_dlpack(memory.array(memory.views[name])).mul_(2)  # an optimizer
    assert_bits(live, naive(CONFIG, values | {name: values[name] * 2}, 1, 0, torch.float32))
    assert driver.num_maps == 2


def test_memory_that_cannot_be_shared() -> None:
    driver = Memfd(handles=True)
    live = live_parameters(driver)
    link = export_parameters(live, driver)
    with pytest.raises(NotExportable, match="not allocated here"):
        export_parameters({"w": torch.zeros(3)}, driver)
    with pytest.raises(NotExportable, match="w is not contiguous"):
        export_parameters(
            {"w": live["lm_head.weight" if "lm_head.weight" in live else "model.norm.weight"][::2]}, driver
        )
    with pytest.raises(NotExportable, match="not in memory of PyTorch's own allocator"):
        export_parameters(live_parameters(files := Memfd()), files)
    with pytest.raises(Unsupported, match="the engine is on GPU 0 of this process, the module on GPU 1"):
        EngineMemory(link, PARAMETERS, "float32", 1, driver)
    with pytest.raises(TransferError, match="has not said where its parameter other lies"):
        EngineMemory(link, [replace(PARAMETERS[0], name="other")], "float32", 0, driver)


class Engine:
    """Answers the steps of an update."""

    def __init__(self, link: bytes) -> None:
        self.link, self.seen, self.rolled_back = link, list[str](), list[int]()

    async def send_steps(self, steps: Any, drop_failed: bool = False) -> None:
        (step,) = steps.values()
        self.seen += [step.offer.transport] if step.offer else ["stage"] if step.manifests is not None else ["commit"]

    async def receive_reports(self) -> dict[str, UpdateReports]:
        report = {
            "stage": UpdateReports(stage=StageReport(0, 0.0)),
            "commit": UpdateReports(commit=CommitReport(0.5, 0.0)),
            ENGINE_NAME: UpdateReports(destinations=Destinations(((self.link,),), b"")),
        }
        return {"engine-0": report[self.seen[-1]]}

    async def rollback(self, version: int) -> None:
        self.rolled_back.append(version)

    async def checksums(self, engine: str = "") -> Any:
        raise NotImplementedError


def test_an_update_is_written_between_begin_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Memfd(handles=True)
    monkeypatch.setattr(shared, "CudaDriver", lambda device: driver)
    live = live_parameters(driver)
    client = Engine(export_parameters(live, driver))
    info = EngineInfo(
        "engine-0", "vllm", CONFIG.fingerprint, "float32", 1, families.tensors(CONFIG), PARAMETERS,
        ("cuda", ENGINE_NAME), host_identity(), 64, 4, -1, pid=7,
    )  # fmt: skip
    values = weights(1)
    sharing = Sharing(client, values, [info], ScanOptions(), 0)

    async def scenario() -> None:
        assert not sharing.arrays
        await sharing.begin([info], 1)
        assert_bits(live, naive(CONFIG, values, 1, 0, torch.float32))
        report = await sharing.commit("keep")
        assert report.num_bytes == 0 and report.engines[0].transport == ENGINE_NAME and report.pause_seconds == 0.5
        arrays = sharing.arrays
        await sharing.begin([info], 2)
        assert sharing.arrays is arrays and driver.num_maps == 2, "the memory is mapped once"
        torch.from_dlpack(arrays["model.norm.weight"]).add_(1)
        await sharing.commit("keep")
        changed = values | {"model.norm.weight": values["model.norm.weight"] + 1}
        assert_bits(live, naive(CONFIG, changed, 1, 0, torch.float32))
        with pytest.raises(Unsupported, match="must not be restarted"):
            await sharing.begin([replace(info, pid=8)], 3)
        with pytest.raises(Unsupported, match="have one engine"):
            await sharing.begin([info, replace(info, name="engine-1")], 3)

    asyncio.run(scenario())
    assert client.seen == [ENGINE_NAME, "stage", "commit"] * 2 and client.rolled_back == []
    sharing.close()
    with pytest.raises(Unsupported, match=r"VllmConfig\(share_weights=True\)"):
        Sharing(client, values, [replace(info, transports=("cuda",))], ScanOptions(), 0)
