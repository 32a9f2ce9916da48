"""The weight bridge of torch trainers in local and shared mode, and a trainer that speaks only its endpoints."""

import json
import runpy
import sys
from pathlib import Path

import httpx
import pytest
import torch

import slipstream
from slipstream.config import EmbeddedConfig, HttpConfig
from slipstream.deploy.slurm.job import JobRendezvous, rendezvous
from slipstream.errors import ConfigError, DeadlineExceeded, MappingError, NotReady, Unauthorized, Unsupported
from slipstream.plugins import TorchWeightBridge
from slipstream.types import SamplingParams
from tests.tiny import hf_directory, hf_greedy, hf_model, tiny_config

PROMPT, COUNT = (5, 7, 11, 13, 17), 8
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
TRAINER = Path(__file__).with_name("plain_trainer.py")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A gateway that serves local trainers without a token."""
    where = tmp_path_factory.mktemp("bridge")
    (where / "weights").mkdir()
    model = hf_directory(where / "model")
    http = HttpConfig(weights=str(where / "weights"), tokenless=True)
    engine = EmbeddedConfig(max_num_seqs=4, max_model_len=64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOGDIR", str(where / "logs"))
        bridge = slipstream.launch(model, http=http, run_dir=where / "run", engine=engine)
    with bridge:
        yield bridge


def logs(fleet):
    return Path(fleet.run_dir).parent / "logs"


def tokens(fleet):
    (found,) = fleet.generate([PROMPT], GREEDY)
    return found.token_ids


def learn(module, optimizer):
    ids = torch.tensor([PROMPT * 4])
    optimizer.zero_grad()
    module(ids, labels=ids).loss.backward()
    optimizer.step()


def test_a_trainer_that_knows_only_the_endpoints_and_no_token(fleet, monkeypatch, capsys):
    """The script imports nothing of ours."""
    assert "slipstream" not in TRAINER.read_text().partition('"""')[2].partition('"""')[2]
    arguments = [fleet.http_url, str(logs(fleet)), str(logs(fleet).parent / "model"), "2"]
    monkeypatch.setattr(sys, "argv", [str(TRAINER), *arguments])
    runpy.run_path(str(TRAINER), run_name="__main__")  # here, where torch and transformers are imported already
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["engine"] == first["module"] and second["engine"] == second["module"] != first["module"]
    assert second["info"]["policy_version"] == first["info"]["policy_version"] + 1
    assert second["info"]["update_count"] == first["info"]["update_count"] + 1 and second["info"]["last_update_time"]


def test_local_mode_brings_each_step_to_the_engines(fleet, tmp_path):
    module = hf_model(tiny_config(), seed=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    of_a_killed_trainer = logs(fleet).parent / "weights" / "torch-1-7-0"  # process 1 has another start time
    of_a_killed_trainer.mkdir()
    with TorchWeightBridge(module, url=fleet.http_url, log_dir=logs(fleet)) as bridge:
        assert bridge.mode == "local" and bridge.get_trainable_model() is module
        assert bridge.mappings["model.norm.weight"]["vllm_name"] == "model.norm.weight"
        with pytest.raises(NotReady, match="call broadcast_weights"):
            bridge.notify_update()
        seen = []
        for _ in range(3):
            learn(module, optimizer)
            bridge.broadcast_weights()
            version = bridge.notify_update()
            assert tokens(fleet) == hf_greedy(module, PROMPT, COUNT)
            seen.append((version, tokens(fleet)))
        assert [version for version, _ in seen] == list(range(seen[0][0], seen[0][0] + 3)) and len(set(seen)) == 3
        left = Path(httpx.get(f"{fleet.http_url}/bridge/info", timeout=60).json()["weights"])
    assert not list(left.glob("torch-*"))
    with pytest.raises(NotReady, match="call initialize"):
        bridge.broadcast_weights()


def test_local_mode_without_the_mapping_file_asks_the_gateway(fleet):
    with TorchWeightBridge(str(logs(fleet).parent / "model"), url=fleet.http_url) as bridge:
        bridge.broadcast_weights()
        bridge.notify_update()
        assert tokens(fleet) == hf_greedy(bridge.get_trainable_model(), PROMPT, COUNT)


def test_shared_mode_holds_the_engines_while_an_optimizer_steps(fleet):
    module = hf_model(tiny_config(), seed=4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with TorchWeightBridge(module, mode="shared", log_dir=fleet.run_dir) as bridge:
        before = tokens(fleet)
        assert before == hf_greedy(module, PROMPT, COUNT)
        other.step()  # not of this module: nobody waits
        assert tokens(fleet) == before
        learn(module, optimizer)
        optimizer.step()  # the engines are still held
        bridge.broadcast_weights()
        version = bridge.notify_update()
        after = tokens(fleet)
        assert after == hf_greedy(module, PROMPT, COUNT) != before
        assert bridge.notify_update() == version + 1 == fleet.status().version


def test_ranks_that_do_not_start_are_not_waited_for_forever(fleet, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = hf_model(tiny_config())
    with pytest.raises(Unsupported, match="shared mode is for a trainer of one process, and this one has 2"):
        TorchWeightBridge(module, mode="shared", log_dir=fleet.run_dir).initialize()
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of the trainer did not find the 1 other.*same WORLD_SIZE"):
        TorchWeightBridge(module, mode="distributed", log_dir=fleet.run_dir, timeout=2).initialize()


def test_a_module_of_another_model_is_refused_before_anything_is_sent(fleet):
    bridge = TorchWeightBridge(hf_model(tiny_config(vocab_size=64)), url=fleet.http_url, log_dir=logs(fleet))
    with pytest.raises(
        MappingError, match=r"lm_head.weight: the engines have shape \[96, 32\], the module has shape \[64, 32\]"
    ):
        bridge.initialize()


def test_a_gateway_that_is_not_there_is_named(tmp_path):
    module = torch.nn.Linear(1, 1)
    with pytest.raises(DeadlineExceeded, match=r"http://127.0.0.1:9 .*is it running"):
        TorchWeightBridge(module, url="http://127.0.0.1:9", timeout=0.1).initialize()
    with pytest.raises(DeadlineExceeded, match=r"vllm_bridge_config.json, which the gateway writes"):
        TorchWeightBridge(module, mode="shared", log_dir=tmp_path, timeout=0.1).initialize()
    with pytest.raises(ConfigError, match="needs log_dir"):
        TorchWeightBridge(module, mode="distributed")


# --- the switch for trainers without a token --------------------------------------------------------------------------


def test_the_gateway_warns_that_it_asks_for_no_token(fleet):
    assert (
        "tokenless: without a token, every process on this machine may"
        in (Path(fleet.run_dir) / "gateway.log").read_text()
    )


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/bridge/info", {}, 200),
        ("/bridge/info", {"Host": "localhost"}, 200),
        ("/v1/models", {}, 401),  # only the bridge dialect
        ("/metrics", {}, 401),
        ("/bridge/info", {"Origin": "http://evil.example"}, 401),  # a web page
        ("/bridge/info", {"Host": "evil.example"}, 401),  # a web page whose name leads here
        ("/bridge/info", {"Authorization": "Bearer wrong"}, 401),
    ],
)
def test_without_a_token_only_local_trainers_are_served(fleet, path, headers, status):
    assert httpx.get(fleet.http_url + path, headers=headers, timeout=60).status_code == status


def test_without_the_switch_a_token_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="tokenless is set and host is 'node01'"):
        HttpConfig(host="node01", certificate="c", key="k", tokenless=True)


def test_a_wrong_token_is_a_typed_error(fleet):
    with pytest.raises(Unauthorized, match="token missing or wrong"):
        TorchWeightBridge(hf_model(tiny_config()), url=fleet.http_url, token="wrong").initialize()


# --- the rendezvous of a job ------------------------------------------------------------------------------------------


def test_the_rendezvous_follows_the_node_list():
    job = {"SLURM_JOB_NODELIST": "gpu[1-4]", "NUM_INFERENCE_NODES": "2"}
    found = rendezvous(job)
    assert found == JobRendezvous("gpu1", ("gpu3", "gpu4"))
    assert found.trainers_url("nccl") == "tcp://gpu1:26756" and found.trainers_url("gloo") == "tcp://gpu1:26757"
    for alone in ({}, job | {"NUM_INFERENCE_NODES": "0"}, {"SLURM_JOB_NODELIST": "gpu[1-4]"}):
        assert rendezvous(alone) == JobRendezvous("localhost")
    for wrong, said in (
        ({"NUM_INFERENCE_NODES": "two"}, "got 'two'"),
        (job | {"NUM_INFERENCE_NODES": "4"}, "leave none"),
    ):
        with pytest.raises(ConfigError, match=said):
            rendezvous(wrong)
