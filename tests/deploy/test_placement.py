"""Which GPUs engines take: the plan, and launched processes that see theirs."""

from __future__ import annotations

import pytest

from slipstream.config import EmbeddedConfig, RemoteConfig, VllmConfig
from slipstream.deploy.processes import gpus
from slipstream.deploy.processes.gpus import Gpu
from slipstream.deploy.processes.placement import place
from slipstream.errors import ConfigError

GPUS = [Gpu(index, f"GPU-{index:08}", "NVIDIA H200") for index in range(4)]
ONE, TWO = EmbeddedConfig(), VllmConfig(tensor_parallel_size=2)
PIPELINE = VllmConfig(tensor_parallel_size=2, vllm={"pipeline_parallel_size": 2})
SERVER = RemoteConfig(url="https://gpu-7:8000")


@pytest.mark.parametrize(
    ("configs", "devices", "trainer", "share", "placed"),
    [
        ([TWO, TWO], [[0, 1], [2, 3]], (), False, [(0, 1), (2, 3)]),
        ([TWO, TWO], [3, 2, 1, 0], (), False, [(3, 2), (1, 0)]),
        ([TWO, ONE], "auto", (0,), False, [(1, 2), (3,)]),
        ([PIPELINE], "auto", (), False, [(0, 1, 2, 3)]),
        ([SERVER, ONE], [[], ["GPU-00000003"]], (), False, [None, (3,)]),
        ([SERVER, ONE, ONE], "auto", ("GPU-00000000", 2), False, [None, (1,), (3,)]),
        ([TWO], [[0, 0]], (0,), True, [(0, 0)]),
        ([VllmConfig(), VllmConfig()], [[2], [2]], (), True, [(2,), (2,)]),
        ([TWO, TWO], "auto", (0, 1, 2), True, [(3, 0), (1, 2)]),
        ([ONE], [[2]], None, False, [(2,)]),
    ],
)
def test_engines_get_the_gpus_that_were_asked_for(configs, devices, trainer, share, placed):
    assert [getattr(c, "devices", None) for c in place(configs, devices, GPUS, trainer, share)] == placed


@pytest.mark.parametrize(
    ("configs", "devices", "trainer", "share", "said"),
    [
        (
            [TWO, TWO],
            "auto",
            (0,),
            False,
            r"2 \+ 2 rank\(s\) need 4 GPU\(s\); of GPU 0, 1, 2, 3, 3 are not the trainer's",
        ),
        ([ONE], "auto", None, False, "which of them the trainer takes is not known: set CUDA_VISIBLE_DEVICES"),
        (
            [TWO, TWO],
            [[0, 1], [1, 2]],
            (),
            False,
            "GPU 1 is taken by engine 0 rank 1 and by engine 1 rank 0; .*share_gpus",
        ),
        ([TWO], [[0, 0]], (), False, "GPU 0 is taken by engine 0 rank 0 and by engine 0 rank 1"),
        ([ONE], [[0]], (0,), False, "GPU 0 is taken by the trainer and by engine 0"),
        ([ONE, ONE], [[0], ["GPU-00000000"]], (), False, "GPU 0 is taken by engine 0 and by engine 1"),
        ([ONE], [[7]], (), False, "there is no GPU 7 here; there is GPU 0, 1, 2, 3"),
        ([ONE], [[0]], (9,), False, "there is no GPU 9 here"),
        ([TWO, TWO], [[0, 1]], (), False, r"devices is \[\[0, 1\]\], but the engines have 2 \+ 2 rank\(s\)"),
        ([TWO], [0], (), False, r"devices names 1 GPU\(s\), \[0\], but the engines have 2 rank"),
        ([ONE], "all", (), False, "devices must be \"auto\", GPUs, or one list of GPUs per engine, got 'all'"),
        (
            [VllmConfig(gpu_memory_utilization=0.6)] * 2,
            [[1], [1]],
            (),
            True,
            r"GPU 1 has 2 ranks .* 0\.6 \+ 0\.6 = 1\.2",
        ),
        (
            [EmbeddedConfig(tensor_parallel_size=2)],
            [[0, 0]],
            (),
            True,
            r"devices is \[0, 0\]: JAX runs one rank per GPU",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(configs, devices, trainer, share, said):
    with pytest.raises(ConfigError, match=said):
        place(configs, devices, GPUS, trainer, share)


def test_a_machine_without_gpus_is_named_as_such(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="no GPU was found here"):
        place([ONE], "auto", [])


def test_gpus_are_found_without_nvml_and_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_from_nvml", tuple)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-a")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.installed() == (Gpu(4), Gpu("GPU-a"))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-b, NVIDIA H200'\necho '1, GPU-c, NVIDIA H200'\n")
    smi.chmod(0o755)
    assert gpus.installed() == (Gpu(0, "GPU-b", "NVIDIA H200"), Gpu(1, "GPU-c", "NVIDIA H200"))


def test_an_engine_sees_its_gpus_and_no_others():
    assert VllmConfig().environment == {}
    shared = VllmConfig(tensor_parallel_size=2, devices=(1, 1))
    assert shared.environment == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert EmbeddedConfig(tensor_parallel_size=2, devices=[3, 1]).environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    with pytest.raises(ConfigError, match=r"devices names 1 GPU\(s\), \[0\], but the engine has 2 rank"):
        VllmConfig(tensor_parallel_size=2, devices=(0,))
