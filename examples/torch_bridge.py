"""Train a PyTorch module with the weight bridge in local mode: the engines are reached over HTTP only.

    python examples/torch_bridge.py [--steps 20]

Starts a fleet whose gateway serves local trainers, as `slipstream launch --http …` would. A tiny Hugging Face model then
learns to count. After every few steps the engine's greedy completion is printed. Needs torch and transformers."""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path

import torch
from torch_trainer import batch, generate_with_transformers, loss_of, tiny_config
from transformers import LlamaForCausalLM

import slipstream
from slipstream.plugins import TorchWeightBridge

PROMPT = (3, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config())
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
        module.save_pretrained(directory)
        http = slipstream.HttpConfig(weights=weights, tokenless=True)
        with (
            slipstream.launch(directory, http=http, run_dir=Path(directory) / "run") as fleet,
            TorchWeightBridge(module, url=fleet.http_url) as bridge,
        ):
            for step in range(1, steps + 1):
                loss = loss_of(module, batch())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bridge.broadcast_weights()
                version = bridge.notify_update()
                if step == steps or step % 5 == 0:
                    tokens = generate(fleet.http_url)
                    print(
                        f"step {step:3d}  loss {loss.item():.3f}  version {version}: 3 4 5 → {' '.join(map(str, tokens))}"
                    )
            if tuple(tokens) != generate_with_transformers(module, PROMPT):
                raise SystemExit("the engine's completion differs from that of transformers")
            print("engine and module agree: True")


def generate(url: str) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["token_ids"][0]
        return tokens


if __name__ == "__main__":
    main()
