"""A torch trainer that knows only HTTP and the mapping file, run by a test: `python plain_trainer.py URL LOGDIR STEPS`.

It imports nothing of Slipstream and sends no token. Prints what the engines generate after each update, and what its own module
would."""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

PROMPT, COUNT = [5, 7, 11, 13, 17], 8


def call(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as answer:
        return json.load(answer)


def wait(done, what):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_alive(url):
    try:
        return call(url, "/health")["status"] == "alive"
    except (urllib.error.URLError, ConnectionError):
        return False


def greedy(module):
    ids = torch.tensor([PROMPT])
    tokens = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
    )
    return tokens[0, len(PROMPT) :].tolist()


def main(url, log_dir, model, steps):
    wait(lambda: is_alive(url), "the gateway is not alive")
    file = Path(log_dir) / "vllm_bridge_config.json"
    wait(file.exists, f"no {file}")
    mappings = json.loads(file.read_text())["param_mappings"]
    module = LlamaForCausalLM.from_pretrained(model)
    own = dict(module.named_parameters())
    assert own.keys() == mappings.keys(), own.keys() ^ mappings.keys()
    assert all(list(own[name].shape) == row["local_shape"] for name, row in mappings.items())
    assert all(row["tp_degree"] == row["dp_shard_degree"] == 1 for row in mappings.values())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for step in range(1, steps + 1):
        ids = torch.tensor([PROMPT * 4])
        optimizer.zero_grad()
        module(ids, labels=ids).loss.backward()
        optimizer.step()
        save_file(
            {name: p.detach() for name, p in own.items()}, f"{call(url, '/bridge/info')['weights']}/model.safetensors"
        )
        call(url, "/bridge/notify_update", {"update_count": step, "trainer_rank": 0, "timestamp": time.time()})
        answer = call(
            url,
            "/generate",
            {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True},
        )
        found.append({"engine": answer["token_ids"][0], "module": greedy(module), "info": call(url, "/bridge/info")})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
