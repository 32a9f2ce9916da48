"""GRPO with the trainer in JAX and rollouts in stock vLLM, on CPU or both on one GPU: every step's weights go to its workers.

    slipstream setup vllm --cpu            # once: an environment with vLLM; or name one with --python
    python examples/grpo_vllm.py [--steps 60] [--every 10] [--python /path/to/python] [--take-turns]

Prints the reward, where a step's time went, and how far the trainer's logprobs of the sampled tokens are from those that vLLM
reported: `ratio` is the mean of their quotient, exactly 1 if the two were one model, and `gap` the mean of what they differ by.
With --take-turns vLLM sleeps while the trainer trains, and what it holds on its device is printed for each part of a step."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

# On a GPU that trainer and engine share: JAX takes this much of it when it starts, vLLM what `memory_share` says.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")

import slipstream
from slipstream.config import EngineConfig
from slipstream.rl.config import TrainConfig
from slipstream.rl.loop import train
from slipstream.rl.records import Evaluation, StepRecord
from slipstream.rl.tokens import write_small_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="print every so many steps")
    parser.add_argument("--python", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--take-turns", action="store_true", help="vLLM sleeps while the trainer trains")
    arguments = parser.parse_args()
    engine = EngineConfig(kind="vllm", python=arguments.python, max_concurrency=256, max_model_len=32, memory_share=0.3)
    config = TrainConfig(
        steps=arguments.steps, eval_every=arguments.steps, engine=engine, take_turns=arguments.take_turns
    )
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        write_small_model(model)
        with slipstream.launch(model, engine=engine, run_dir=Path(root) / "run", start_timeout=300) as bridge:
            print("step  reward   generate    train     sync    pause   transport  ratio     gap")
            for record in train(config, bridge, model, Path(root) / "records"):
                if isinstance(record, StepRecord) and record.step % arguments.every == 0:
                    show(record)
                elif isinstance(record, Evaluation):
                    print(f"      after {record.step} steps: sampled accuracy {record.sampled_train:.3f}")


def show(record: StepRecord) -> None:
    s, m = record.seconds, record.metrics
    times = "  ".join(f"{1e3 * x:5.1f} ms" for x in (s.generate, s.train, s.sync, record.sync.pause_seconds))
    way = record.sync.engines[0].transport
    print(f"{record.step:4d}  {record.reward:.3f}  {times}   {way:9s}  {m.ratio:.6f}  {m.gap:.1e}")
    if record.memory:
        held = ", ".join(f"{when} {num_bytes / 1e9:.2f} GB" for when, num_bytes in record.memory.items())
        print(f"      vLLM holds: {held}; sleep {1e3 * s.sleep:.0f} ms, wake {1e3 * s.wake:.0f} ms")


if __name__ == "__main__":
    main()
