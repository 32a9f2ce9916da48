"""Weights that a trainer broadcasts as to vLLM's workers: the calls that TRL makes, with a stand-in for vLLM's NCCL."""

import ctypes
import os
import pickle
import secrets
import socket
import sys
import threading
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream.http.nccl_receiver import unique_id_of
from tests.http import vllm_stub
from tests.http.served import make_model, serve

BUFFER = 4000


class ncclUniqueId(ctypes.Structure):  # as vLLM's
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pickled_id(unique_id):
    value = ncclUniqueId()
    ctypes.memmove(value.internal, unique_id, 128)
    return pickle.dumps(value)


def test_the_unique_id_is_read_without_unpickling():
    unique_id = secrets.token_bytes(128)
    assert unique_id_of(pickled_id(unique_id)) == unique_id

    class Evil:
        def __reduce__(self):
            return os.mkdir, ("evil",)

    with pytest.raises(ValueError, match="one id of 128 bytes"):
        unique_id_of(pickle.dumps(Evil()))


class Trainer:
    """TRL's half: the store, the communicator and the calls."""

    def __init__(self, served, directory):
        self._served, self._id = served, secrets.token_bytes(128)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / self._id[:4].hex()))
        self._listener.listen()
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, 2, True, timeout=timedelta(seconds=60), wait_for_workers=False, use_libuv=False
        )
        self._store.set("broadcast_from/0/0", pickled_id(self._id))

    def init(self):
        world_size = self._served.get("/get_world_size")["world_size"] + 1
        info = {"master_address": "127.0.0.1", "master_port": self._store.port, "rank_offset": 1}
        info |= {"world_size": world_size, "packed": True, "packed_buffer_size_bytes": BUFFER}
        self._served.post("/init_weight_transfer_engine", {"init_info": info})
        self._peer, _ = self._listener.accept()

    def update(self, tensors, status=200, leave=False):
        rows = list(tensors.items())
        info = {
            "names": [name for name, _ in rows],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in rows],
            "shapes": [list(tensor.shape) for _, tensor in rows],
        }
        self._served.post("/start_weight_update", {})
        sending = threading.Thread(target=self._broadcast, args=(rows, leave))
        sending.start()
        try:
            return self._served.post("/update_weights", {"update_info": info}, status)
        finally:
            sending.join()

    def _broadcast(self, rows, leave):
        if leave:
            return self._peer.close()
        for _, tensor in rows:
            self._peer.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def finish(self):
        return self._served.post("/finish_weight_update", {})["policy_version"]


def test_tensors_become_a_version_of_the_whole_fleet(tmp_path, monkeypatch):
    stub = vllm_stub.write(tmp_path / "stub")
    sockets = tmp_path / "s"
    sockets.mkdir()
    monkeypatch.setenv("STUB_DIR", str(sockets))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stub), os.environ.get("PYTHONPATH", "")]))
    tensors = load_file(make_model(tmp_path / "other", seed=5) / "model.safetensors")
    with serve(tmp_path, engines=2, nccl_python=sys.executable) as served:
        config = served.get("/server_info?config_format=json")["vllm_config"]
        assert config["weight_transfer_config"] == {"backend": "nccl"}
        trainer = Trainer(served, sockets)
        trainer.init()
        before = served.bridge.status().version
        trainer.update(tensors)
        assert served.bridge.status().version == before  # nothing changes before the end of the update
        assert trainer.finish() == before + 1
        versions = {engine.info.version for engine in served.bridge.status().engines}
        assert versions == {before + 1} and served.bridge.verify(tensors).is_same
        assert not list(served.weights.iterdir())

        failed = trainer.update(tensors, status=409, leave=True)
        assert failed["error"]["code"] == "TransferError" and "the trainer has left" in failed["error"]["message"]
        assert served.bridge.verify(tensors).is_same and not list(served.weights.iterdir())
        again = Trainer(served, sockets)
        again.init()
        again.update({name: tensor * 0.5 for name, tensor in tensors.items()})
        assert again.finish() == before + 2
        assert len(served.bridge.generate([[5, 6]], slipstream.SamplingParams(max_tokens=2))) == 1


def test_other_groups_are_refused(tmp_path):
    from slipstream.http.nccl_receiver import Receiver

    with pytest.raises(ValueError, match="the trainer and this process"):
        Receiver().init({"world_size": 3})
