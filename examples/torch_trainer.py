"""Train a PyTorch module that shares one copy of its weights with the engine, on CPU or on a GPU.

    python examples/torch_trainer.py [--steps 40] [--device cuda]

A tiny Hugging Face model learns to count. An engine in another process serves from the memory of the module's
parameters, so that an optimizer step becomes a new policy version without a transfer. Prints the engine's greedy
completion every 10 steps, and finally compares it with transformers' output for the module. Needs torch and
transformers."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import slipstream
from slipstream.plugins.torch_trainer import share_weights

VOCAB, LENGTH, SHOWN = 32, 12, 8
GREEDY = slipstream.SamplingParams(max_tokens=SHOWN, temperature=0.0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the module; the engine runs on JAX's device"
    )
    arguments = parser.parse_args()
    steps = arguments.steps
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config()).to(arguments.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as model:
        module.config.save_pretrained(model)  # no weights: the engine uses the trainer's
        with slipstream.launch(model, engine=slipstream.EmbeddedConfig(max_num_seqs=8)) as bridge:
            shared = share_weights(bridge, module)
            for step in range(1, steps + 1):
                loss = loss_of(module, batch().to(arguments.device))
                optimizer.zero_grad()
                loss.backward()
                with shared.updating():  # pauses the engine, which resumes with the next version
                    optimizer.step()
                if step in (1, steps) or step % 10 == 0:
                    (completion,) = bridge.generate([(3, 4, 5)], GREEDY)
                    pause = 1e3 * shared.report.pause_seconds if shared.report else 0.0
                    print(f"step {step:3d}  loss {loss.item():.3f}  engine paused {pause:.1f} ms", end="  ")
                    print(f"version {completion.version}: 3 4 5 → {' '.join(map(str, completion.token_ids))}")
            same = completion.token_ids == generate_with_transformers(module, (3, 4, 5))
            print(f"engine and module agree: {same}")
            if not same:
                raise SystemExit("the engine's completion differs from that of transformers")


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


def batch() -> torch.Tensor:
    """Return sequences of consecutive numbers with random starts, modulo the vocabulary size."""
    return (torch.randint(0, VOCAB, (16, 1)) + torch.arange(LENGTH)) % VOCAB


def loss_of(module: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return module(ids, labels=ids).loss


def generate_with_transformers(module: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt], device=module.device)
    sequences = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=SHOWN,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(sequences[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main()
