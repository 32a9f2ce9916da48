"""A small model behind a gateway with HTTP, and an authenticated client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.model.checkpoints import hf_weights
from tests.tiny import random_params, tiny_config, write_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ style | default('') }}"
    "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


@dataclass(frozen=True)
class Served:
    bridge: Bridge
    model: Path
    weights: Path
    """Directory of checkpoints."""

    @property
    def url(self) -> str:
        return self.bridge.http_url

    @property
    def token(self) -> str:
        return (Path(self.bridge.run_dir) / "token").read_text()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def get(self, path: str, status: int = 200) -> Any:
        return answer(httpx.get(self.url + path, headers=self.headers, timeout=120), status)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return answer(httpx.post(self.url + path, json=body, headers=self.headers, timeout=120), status)


def answer(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def make_model(path: Path, seed: int = 0, **shape: Any) -> Path:
    """Write a model with a chat template and a tokenizer that transformers can read."""
    config = tiny_config(vocab_size=64, **shape)
    hf_weights.save(path, random_params(config, seed), config)
    write_tokenizer(path)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "pad_token": "<pad>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@contextlib.contextmanager
def serve(tmp_path: Path, engines: int = 1, **http: Any) -> Iterator[Served]:
    model, weights = make_model(tmp_path / "tiny"), Path(http.pop("weights", tmp_path / "weights"))
    weights.mkdir(exist_ok=True)
    config = slipstream.HttpConfig(weights=str(weights), **http)
    with slipstream.launch(model, engines=engines, http=config, run_dir=tmp_path / "run") as bridge:
        yield Served(bridge, model, weights)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
