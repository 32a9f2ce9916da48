"""vLLM's RL endpoints and the bridge dialect, with a fleet of two engines."""

import json
import os
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

import slipstream
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from tests.http.served import eventually, make_model, serve
from tests.tiny import random_params, tiny_config


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Its checkpoints are in shared memory, from which safetensors are mapped; no disk is involved."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        serve(tmp_path_factory.mktemp("fleet"), engines=2, weights=shared) as found,
    ):
        yield found


@pytest.fixture(autouse=True)
def awake(request):
    """Leave running engines for the next test."""
    yield
    if "fleet" in request.fixturenames:
        fleet = request.getfixturevalue("fleet")
        fleet.post("/resume")
        fleet.post("/wake_up")


def in_background(fleet, path, body):
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(fleet.url + path, json=body, headers=fleet.headers, timeout=120))
    )
    thread.start()
    return thread, answers


def requests_of(fleet):
    return sum(engine.num_requests for engine in fleet.bridge.status().engines)


def test_requests_wait_while_the_fleet_is_paused(fleet):
    for _ in range(2):  # repeating is allowed
        assert fleet.post("/pause?mode=keep") == {"status": "paused"}
    assert fleet.get("/is_paused") == fleet.get("/bridge/is_paused") == {"is_paused": True}
    assert all(engine.is_paused for engine in fleet.bridge.status().engines)
    thread, answers = in_background(fleet, "/v1/completions", {"prompt": "abc", "max_tokens": 4})
    eventually(lambda: requests_of(fleet) == 1)
    assert not answers
    assert fleet.post("/resume") == {"status": "resumed"}
    thread.join(60)
    assert answers[0].status_code == 200
    assert fleet.get("/is_paused") == {"is_paused": False}


def test_a_pause_by_the_trainer_is_reported(fleet):
    fleet.bridge.pause()
    assert fleet.get("/is_paused") == {"is_paused": True}
    fleet.bridge.resume()
    assert fleet.get("/is_paused") == {"is_paused": False}


def test_pause_with_abort_answers_waiting_clients_with_409(fleet):
    fleet.post("/pause?mode=keep")
    thread, answers = in_background(fleet, "/v1/completions", {"prompt": "abc"})
    eventually(lambda: requests_of(fleet) == 1)
    fleet.post("/pause?mode=abort")
    thread.join(60)
    assert answers[0].status_code == 409 and answers[0].json()["error"]["code"] == "aborted"
    eventually(lambda: requests_of(fleet) == 0)


def test_abort_by_id_and_abort_all(fleet):
    fleet.post("/pause?mode=keep")
    assert fleet.post("/abort_requests", {}) == {"status": "aborted", "aborted": 0}
    mine, others = (
        in_background(fleet, path, {"prompt": "abc", "request_id": name})
        for path, name in (("/v1/completions", "mine"), ("/generate", "other"))
    )
    eventually(lambda: requests_of(fleet) == 2)
    assert fleet.post("/abort_requests", {"request_ids": ["nobody"]})["aborted"] == 0
    assert fleet.post("/abort_requests", {"request_ids": ["cmpl-mine"]})["aborted"] == 1
    mine[0].join(60)
    assert mine[1][0].status_code == 409 and not others[1]
    assert fleet.post("/abort_requests", {})["aborted"] == 1
    others[0].join(60)
    assert others[1][0].status_code == 409


def test_pause_with_wait_lets_requests_finish(fleet):
    threads = [in_background(fleet, "/v1/completions", {"prompt": "abc", "max_tokens": 100}) for _ in range(4)]
    assert fleet.post("/pause?mode=wait") == {"status": "paused"}
    fleet.post("/resume")
    for thread, answers in threads:
        thread.join(60)
        assert answers[0].status_code == 200


def test_sleep_and_wake(fleet):
    for _ in range(2):
        assert fleet.post("/sleep?level=1&mode=keep") == {"status": "sleeping", "level": 1}
    assert fleet.get("/is_sleeping") == {"is_sleeping": True}
    assert fleet.post("/wake_up?tags=weights")["status"] == "sleeping"
    assert fleet.post("/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    assert fleet.get("/bridge/is_sleeping") == {"is_sleeping": False}
    fleet.post("/sleep?level=0")
    assert fleet.get("/is_paused") == {"is_paused": True} and fleet.get("/is_sleeping") == {"is_sleeping": True}
    assert fleet.post("/wake_up") == {"status": "awake", "tags": None}
    assert fleet.get("/is_paused") == {"is_paused": False} and fleet.get("/is_sleeping") == {"is_sleeping": False}
    fleet.post("/pause")
    fleet.post("/sleep?mode=wait")
    fleet.post("/wake_up")
    assert fleet.get("/is_paused") == {"is_paused": True}, "a pause is not ended by waking"
    assert fleet.post("/sleep?level=3", status=400)["error"]["param"] == "level"
    assert fleet.post("/wake_up?tags=all", status=400)["error"]["param"] == "tags"


def test_server_info_and_world_size(fleet):
    assert fleet.get("/get_world_size") == {"world_size": 2}
    assert fleet.get("/get_world_size?include_dp=false") == {"world_size": 1}
    assert fleet.post("/reset_prefix_cache") == {"success": True}
    config = fleet.get("/server_info?config_format=json")["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32" and config["parallel_config"]["data_parallel_size"] == 2
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"


def test_notify_update_loads_a_checkpoint_into_every_engine(fleet):
    make_model(fleet.weights / "step-1", seed=1)
    before = fleet.get("/bridge/info")
    found = fleet.post(
        "/bridge/notify_update", {"update_count": 1, "trainer_rank": 0, "timestamp": 1.5, "path": "step-1"}
    )
    assert found["loaded"] and found["policy_version"] == before["policy_version"] + 1
    assert fleet.bridge.verify(str(fleet.weights / "step-1")).is_same
    after = fleet.get("/bridge/info")
    assert after["update_count"] == before["update_count"] + 1 and after["last_update_time"] > 0
    assert {engine["version"] for engine in after["engines"]} == {found["policy_version"]}
    (completion,) = fleet.post("/v1/completions", {"prompt": "abc"})["choices"]
    assert completion["policy_version"] == found["policy_version"]
    # A repeated notice, or one from another process of the trainer, loads nothing.
    assert not fleet.post("/bridge/notify_update", {"update_count": 1, "path": "step-1"})["loaded"]
    assert not fleet.post("/bridge/notify_update", {"update_count": 2, "trainer_rank": 1, "path": "step-1"})["loaded"]
    gateway = json.loads((Path(fleet.bridge.run_dir) / "gateway.json").read_text())["pid"]
    assert "jaxlib" not in Path(f"/proc/{gateway}/maps").read_text()


def test_a_partial_checkpoint_keeps_the_other_tensors(fleet):
    whole = make_model(fleet.weights / "whole", seed=2)
    fleet.post("/bridge/notify_update", {"path": "whole"})
    config = read_config(whole)
    other = random_params(tiny_config(vocab_size=64), seed=3)
    part = fleet.weights / "part"
    part.mkdir()
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": np.asarray(other["model"]["norm"]["weight"])}, part / "model.safetensors")
    refused = fleet.post("/bridge/notify_update", {"path": "part"}, status=400)
    assert refused["error"]["code"] == "MappingError"
    assert fleet.post("/bridge/notify_update", {"path": "part", "partial": True})["loaded"]
    merged = hf_weights.load(whole, config)
    merged["model"]["norm"]["weight"] = other["model"]["norm"]["weight"]
    assert fleet.bridge.verify(merged).is_same


def test_an_update_in_vllms_four_steps(fleet):
    make_model(fleet.weights / "step-2", seed=4)
    version = fleet.get("/weight_info")["policy_version"]
    fleet.post("/init_weight_transfer_engine", {"init_info": {"backend": "checkpoint"}})
    fleet.post("/start_weight_update", {"is_checkpoint_format": True})
    assert fleet.post("/finish_weight_update", status=400)["error"]["code"] == "RequestError"
    for _ in range(2):
        fleet.post("/update_weights", {"update_info": {"path": "step-2"}})
    assert fleet.get("/weight_info")["policy_version"] == version, "nothing before the end"
    for _ in range(2):  # a client repeats a call whose answer was lost
        done = fleet.post("/finish_weight_update", {"weight_version": "epoch 3"})
        assert done["policy_version"] == version + 1
    assert fleet.get("/weight_info") == {"weight_version": "epoch 3", "policy_version": version + 1}
    assert fleet.bridge.verify(str(fleet.weights / "step-2")).is_same
    assert fleet.post("/update_weight_version", {"new_version": "x"}) == {"success": True, "new_version": "x"}
    assert fleet.get("/weight_info")["weight_version"] == "x"


def test_weights_over_nccl_are_refused_with_the_reason(fleet):
    nccl = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 3}
    refused = fleet.post("/init_weight_transfer_engine", {"init_info": nccl}, status=400)["error"]
    assert refused["code"] == "Unsupported" and "slipstream.connect" in refused["message"]
    assert "call /init_weight_transfer_engine" in fleet.post("/start_weight_update", status=400)["error"]["message"]
    fleet.post("/init_weight_transfer_engine", {"init_info": {"backend": "checkpoint"}})
    fleet.post("/start_weight_update")
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "packed": True}
    assert "NCCL" in fleet.post("/update_weights", {"update_info": info}, status=400)["error"]["message"]
    assert fleet.post("/collective_rpc", {"method": "reload"}, status=400)["error"]["code"] == "Unsupported"


def test_weight_checksums(fleet):
    found = fleet.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert {key.split("/")[0] for key in found} == {"engine-0", "engine-1"}
    assert fleet.post("/weight_checker", {"action": "compare", "baseline": found}) == {"match": True, "mismatches": []}
    key = min(found)
    wrong = fleet.post("/weight_checker", {"action": "compare", "baseline": found | {key: "0"}})
    assert wrong == {"match": False, "mismatches": [key]}
    fleet.post("/weight_checker", {"action": "reset"}, status=400)


def test_state_dict_info(fleet):
    found = fleet.get("/bridge/state_dict_info")
    assert found["model.embed_tokens.weight"] == {"shape": [64, 32], "dtype": "float32"}


def test_the_mapping_file_describes_every_tensor(fleet):
    file = Path(fleet.bridge.run_dir) / "vllm_bridge_config.json"
    found = json.loads(file.read_text())
    assert found == fleet.get("/bridge/parameters") and found["model_name"] == "tiny"
    assert found["engines"].keys() == {"engine-0", "engine-1"}
    rows = found["engines"]["engine-0"]["parameters"]
    assert {name: row["shape"] for name, row in rows.items()} == {
        name: row["shape"] for name, row in fleet.get("/bridge/state_dict_info").items()
    }
    wanted = dict(shape=[64, 32], local_shape=[64, 32], dtype="float32", tp_degree=1, data_shard_degree=1)
    assert rows["model.embed_tokens.weight"] == wanted | {"engine_name": "model.embed_tokens.weight"}
    for name, row in found["param_mappings"].items():
        assert row["vllm_name"] == rows[name]["engine_name"] and row["dp_shard_degree"] == 1
        assert all(row[key] == rows[name][key] for key in ("local_shape", "dtype", "tp_degree"))


@pytest.mark.parametrize("path", ["..", "../tiny", "/etc", "link", "nowhere", "a\x00b", "x" * 5000, "files"])
def test_only_checkpoints_under_the_directory_are_loaded(fleet, path):
    link, files = fleet.weights / "link", fleet.weights / "files"
    if not link.exists():
        link.symlink_to(fleet.model)
        files.mkdir()
        (files / "model.safetensors").symlink_to(fleet.model / "model.safetensors")
    version = fleet.bridge.status().version
    assert fleet.post("/bridge/notify_update", {"path": path}, status=400)["error"]["code"] == "RequestError"
    assert fleet.bridge.status().version == version


def test_an_invalid_checkpoint_changes_nothing(fleet):
    torn = fleet.weights / "torn"
    torn.mkdir()
    version = fleet.bridge.status().version
    assert "holds no weights" in fleet.post("/bridge/notify_update", {"path": "torn"}, status=400)["error"]["message"]
    (torn / "model.safetensors").write_bytes(b"\0" * 100)
    fleet.post("/bridge/notify_update", {"path": "torn"}, status=400)
    for name in ("model.safetensors", "model.safetensors.index.json"):  # the second takes precedence
        (torn / name).unlink(missing_ok=True)
        os.mkfifo(torn / name)
        refused = fleet.post("/bridge/notify_update", {"path": "torn"}, status=400)
        assert "is not a regular file" in refused["error"]["message"]
    assert fleet.bridge.status().version == version


def test_a_trainer_that_holds_the_update_lease_is_not_affected(fleet):
    make_model(fleet.weights / "step-3", seed=5)
    with slipstream.connect(fleet.bridge.run_dir) as trainer:
        trainer.sync(str(fleet.weights / "step-3"))
        refused = fleet.post("/bridge/notify_update", {"path": "step-3"}, status=409)
        assert refused["error"]["code"] == "UpdateInProgress"
    eventually(
        lambda: (
            httpx.post(
                f"{fleet.url}/bridge/notify_update", json={"path": "step-3"}, headers=fleet.headers, timeout=60
            ).is_success
        )
    )


def test_bridge_generate(fleet):
    body = {"prompt": "abc", "n": 2, "max_tokens": 5, "seed": 1, "logprobs": True, "return_token_ids": True}
    found = fleet.post("/generate", body)
    wanted = fleet.bridge.generate(["abc"], slipstream.SamplingParams(n=2, max_tokens=5, seed=1))
    assert found["text"] == [c.text for c in wanted] and found["prompt"] == ["abc", "abc"]
    assert found["token_ids"] == [list(c.token_ids) for c in wanted]
    assert found["logprobs"] == [pytest.approx(c.logprobs) for c in wanted]
    assert found["finish_reasons"] == [c.finish_reason for c in wanted]


def test_bridge_control(fleet):
    for path in ("pause", "resume", "sleep", "wake_up"):
        assert fleet.post(f"/bridge/{path}") == {"status": "ok"}
