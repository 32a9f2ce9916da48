"""Models by their name on the Hub, which is served here on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hub import absolute_model, hub_name, model_directory
from slipstream.model.checkpoints.sample_model import write_sample_model
from tests.model import hub_server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    from huggingface_hub import constants

    write_sample_model(tmp_path / "sample")
    (tmp_path / "sample" / "original").mkdir()
    (tmp_path / "sample" / "original" / "weights.safetensors").write_bytes(b"the same once more")
    (tmp_path / "sample" / "pytorch_model.bin").write_bytes(b"the same as a pickle")
    with hub_server.serving() as served:
        served.models["org/tiny"] = tmp_path / "sample"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 2)
        yield served


def test_what_is_needed_is_downloaded_once(hub: hub_server.Hub) -> None:
    described = model_directory("org/tiny", weights=False)
    assert "model.safetensors" not in hub.downloads and (described / "tokenizer.json").exists()
    for name in ("org/tiny", "org/tiny@v1", Path("org/tiny")):
        directory = model_directory(name)
        assert directory.name == hub_server.commit("org/tiny")
        assert (directory / "config.json").exists() and (directory / "model.safetensors").exists()
    assert len(set(hub.downloads)) == len(hub.downloads)
    assert not {"pytorch_model.bin", "original/weights.safetensors"} & set(hub.downloads)


def test_offline_with_a_warm_cache(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    online = model_directory("org/tiny@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("org/tiny@v1") == online
    with pytest.raises(
        ConfigError, match=r"no directory org/other; .*: it is not in the cache .*/cache, and HF_HUB_OFFLINE is set"
    ):
        model_directory("org/other")


def test_a_directory_is_never_looked_up(hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert model_directory("org/tiny") == Path("org/tiny") and not hub.downloads
    assert hub_name("org/tiny") == "" and absolute_model("org/tiny") == str(tmp_path / "org" / "tiny")
    assert hub_name("org/other@v1") == "org/other" and absolute_model("org/other@v1") == "org/other@v1"
    for path in ("sample", "/org/tiny", "./org/tiny2", "~/org", "a/b/c", "../org"):
        assert hub_name(path) == "", path


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "org/missing",
            r"http://127.0.0.1:\d+ has no model org/missing, or it is private; check the name, or set HF_TOKEN",
        ),
        ("org/tiny@v9", r"http://127.0.0.1:\d+ has no revision 'v9' of org/tiny"),
        (
            "org/gated",
            r"access to org/gated must be granted; ask for it at http://127.0.0.1:\d+/org/gated, and set HF_TOKEN",
        ),
    ],
)
def test_what_the_hub_refuses(hub: hub_server.Hub, model: str, said: str) -> None:
    hub.models["org/gated"] = hub.models["org/tiny"]
    hub.gated.add("org/gated")
    with pytest.raises(ConfigError, match=said):
        model_directory(model)


def test_a_token_opens_a_gated_model(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("org/tiny")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (model_directory("org/tiny") / "config.json").exists()


def test_no_hub(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError,
        match=r"it is not in the cache .*, and cannot be downloaded from http://127.0.0.1:9: .*[Cc]onnect",
    ):
        model_directory("org/tiny")


def test_whatever_takes_a_model_takes_its_name(hub: hub_server.Hub, tmp_path: Path) -> None:
    from slipstream import Engine, SamplingParams
    from slipstream.bridge.chat_tokenizer import ChatTokenizer
    from slipstream.cli.main import app
    from slipstream.model.checkpoints import hf_config, hf_weights

    here, greedy = tmp_path / "sample", SamplingParams(max_tokens=4, temperature=0)
    assert hf_config.read_config("org/tiny") == hf_config.read_config(here)
    params, own = hf_weights.load("org/tiny"), hf_weights.load(here)
    assert (params["model"]["norm"]["weight"] == own["model"]["norm"]["weight"]).all()
    chat = [{"role": "user", "content": "hi"}]
    assert ChatTokenizer.read("org/tiny").render_chat(chat) == ChatTokenizer.read(here).render_chat(chat)
    with Engine("org/tiny", max_num_seqs=2) as by_name, Engine(here, max_num_seqs=2) as by_path:
        assert by_name.generate(["1+1="], greedy)[0].text == by_path.generate(["1+1="], greedy)[0].text
        assert by_name.session("1+1=").token_ids == by_path.session("1+1=").token_ids
    run = CliRunner().invoke
    planned = run(app, ["plan", "org/tiny", "--gpus", "2", "--batch", "8", "--json"])
    assert json.loads(planned.stdout)[0]["engines"] == 1
    job = run(app, ["slurm", "--model", "org/tiny@v1", "--run-dir", "runs", "--", "python", "train.py"])
    assert "org/tiny@v1" in job.stdout and "/org/tiny" not in job.stdout


PROGRAM = """
import json, os, urllib.request, slipstream
from huggingface_hub import constants
from slipstream.config import EmbeddedConfig

def launched():
    with slipstream.launch("org/tiny@v1", engine=EmbeddedConfig(max_num_seqs=4), http=True) as bridge:
        (completion,) = bridge.generate(["1+1="])
        token = open(f"{bridge.run_dir}/token").read()
        call = urllib.request.Request(f"{bridge.http_url}/v1/models", headers={"Authorization": f"Bearer {token}"})
        served = json.load(urllib.request.urlopen(call))["data"][0]["id"]
    return [completion.version, len(completion.token_ids) > 0, served]

online = launched()
os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True  # in other processes, and in this one
os.environ["HF_ENDPOINT"] = constants.ENDPOINT = "http://127.0.0.1:9"
print(json.dumps([online, launched()]))
"""


def test_launch_by_name_serves_the_weights_of_the_hub_and_then_of_the_cache(
    hub: hub_server.Hub, tmp_path: Path
) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, True, "org/tiny"]] * 2
    assert len(set(hub.downloads)) == len(hub.downloads)
