"""Which GPUs engines take: the plan, and launched processes that see theirs."""

from __future__ import annotations

import importlib.util
import os

import pytest

import slipstream
from slipstream.cli.options import parse_devices, parse_trainer_devices
from slipstream.config import EmbeddedConfig, RemoteConfig, VllmConfig, load
from slipstream.deploy.processes import placement
from slipstream.deploy.processes.placement import place, place_here
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import TrainConfig
from slipstream.runtime import gpus
from slipstream.runtime.gpus import Gpu
from slipstream.weights.update.transport_choice import choose, host_identity

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


def test_launched_engines_see_their_own_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the trainer's
    model = tmp_path / "model"
    write_sample_config(model)
    engine = EmbeddedConfig(max_num_seqs=2, max_model_len=32)
    with pytest.raises(ConfigError, match=r"3 engine.* need 3 GPU.*2 are not the trainer's"):
        slipstream.launch(model, engine=engine, engines=3, devices="auto", run_dir=tmp_path / "refused")
    assert not (tmp_path / "refused").exists(), "something was started"
    with slipstream.launch(model, engine=engine, engines=2, devices="auto", run_dir=tmp_path / "run") as bridge:
        engines = [status.info for status in bridge.status().engines]
        assert {info.name: info.devices for info in engines} == {"engine-0": ("2",), "engine-1": ("3",)}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_without_devices_several_engines_on_gpus_are_placed_and_one_inherits(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(placement, "_uses_gpus", lambda config: config.kind == "vllm")
    two = [VllmConfig(), VllmConfig()]
    assert [config.devices for config in place_here(two)] == [(1,), (2,)]
    assert place_here([VllmConfig()]) == [VllmConfig()] and place_here([ONE, ONE]) == [ONE, ONE]
    assert [config.devices for config in place_here([VllmConfig()], trainer=[0])] == [(1,)]
    with pytest.raises(ConfigError, match="share_gpus"):
        place_here([TWO, TWO])


def test_gpus_named_in_configs_are_checked_across_engines(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "3")
    twice = [VllmConfig(devices=(0,)), VllmConfig(devices=(0,))]
    assert place_here(twice, share=True) == twice
    with pytest.raises(ConfigError, match="GPU 0 is taken by engine 0 and by engine 1"):
        place_here(twice)
    with pytest.raises(ConfigError, match="GPU 0 is taken by the trainer and by engine 0"):
        place_here(twice[:1], trainer=[0])
    two_ranks_on_one = [VllmConfig(tensor_parallel_size=2, devices=(0, 0))]
    assert place_here(two_ranks_on_one) == two_ranks_on_one


def test_devices_in_toml_and_on_the_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('engine_devices = [[0, 1], [2, 3]]\ntrainer_devices = ["GPU-a"]\n')
    config = load(TrainConfig, file, ["share_gpus=true"])
    assert config.engine_devices == ((0, 1), (2, 3)) and config.trainer_devices == ("GPU-a",) and config.share_gpus
    assert load(TrainConfig, None, ["engine_devices=auto"]).engine_devices == "auto"
    assert load(TrainConfig, None, ["engine_devices=[2, 3]"]).engine_devices == (2, 3)
    assert [parse_devices(text) for text in ("", "auto", "0,1", "[[0],[0]]")] == [
        None,
        "auto",
        [0, 1],
        [[0], [0]],
    ]
    with pytest.raises(ConfigError, match="--devices is 'GPU 0'; expected auto, 0,1 or"):
        parse_devices("GPU 0")
    assert [parse_trainer_devices(text) for text in ("", "0,1", '["GPU-a"]')] == [(), (0, 1), ("GPU-a",)]
    for text in ("auto", "[[0],[1]]", "GPU 0"):
        with pytest.raises(ConfigError, match=r"--trainer-devices is .*; expected GPUs"):
            parse_trainer_devices(text)


@pytest.mark.parametrize(
    ("visible", "trainer", "found"),
    [("2,3", None, [(0,), (1,)]), ("2,3", [2, 3], [(0,), (1,)]), ("", None, [(0,), (1,)]), ("-1", None, [(0,), (1,)])],
)
def test_auto_takes_gpus_that_the_trainer_does_not_see(monkeypatch, visible, trainer, found):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    placed = place_here([VllmConfig(), VllmConfig()], "auto", trainer)
    assert [config.devices for config in placed] == found


def test_ray_chooses_gpus_by_itself(tmp_path):
    write_sample_config(tmp_path)
    with pytest.raises(ConfigError, match='Ray chooses the GPUs of its actors; use devices="auto"'):
        slipstream.launch(tmp_path, devices=[[0]], cluster="ray")
    with pytest.raises(ConfigError, match=r"devices is \[\(1,\)\], but Ray chooses"):
        slipstream.launch(tmp_path, engine=VllmConfig(devices=(1,)), cluster="ray")


@pytest.mark.parametrize(
    ("visible", "ordinals", "engines", "seen"),
    [
        (None, {0}, ("0",), True),
        (None, {0}, ("1", "2"), False),
        ("2,3", {0}, ("2",), True),
        ("2,3", {0, 1}, ("2",), False),
        ("2,3", {1}, ("GPU-00000003",), True),
        ("2,3", {1}, (), True),
        ("2,3", {1}, ("MIG-a",), True),
    ],
)
def test_whether_an_engine_sees_the_trainers_gpus(monkeypatch, visible, ordinals, engines, seen):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "4")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.are_visible(ordinals, engines) == seen
    transport = choose("e", ("cuda", "nccl", "shm"), host_identity(), 1, on_gpu=True, sees_trainer=seen)
    assert transport == ("cuda" if seen else "nccl" if importlib.util.find_spec("nccl") else "shm")
