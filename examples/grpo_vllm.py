"""GRPO with a JAX trainer and rollouts in stock vLLM, on CPU or sharing one GPU; weights are synced after every step.

    slipstream setup vllm --cpu            # once: creates an environment with vLLM; or pass --python
    python examples/grpo_vllm.py [--steps 60] [--every 10] [--python /path/to/python] [--take-turns]

Prints the reward, the time of each phase of a step, and how far the trainer's logprobs of the sampled tokens are from
vLLM's: `ratio` is the mean probability ratio, exactly 1 if both compute the same, and `gap` the mean absolute
difference of the logprobs. With --take-turns vLLM sleeps while the trainer trains, and its device memory is printed for
each phase."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

# On a shared GPU, JAX reserves this fraction of the memory at startup, and vLLM reserves `gpu_memory_utilization`.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")

import slipstream
from slipstream.config import VllmConfig
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import Evaluation, StepRecord
from slipstream.rl.trainer.loop import training_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="print every N-th step")
    parser.add_argument("--python", default="", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--take-turns", action="store_true", help="vLLM sleeps while the trainer trains")
    arguments = parser.parse_args()
    engine = VllmConfig(python=arguments.python, max_num_seqs=256, max_model_len=32, gpu_memory_utilization=0.3)
    config = TrainConfig(
        steps=arguments.steps, eval_every=arguments.steps, engine=engine, take_turns=arguments.take_turns
    )
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        write_sample_config(model)
        with slipstream.launch(model, engine=engine, run_dir=Path(root) / "run", start_timeout=300) as bridge:
            print("step  reward   generate    train     sync    pause   transport  ratio     gap")
            for record in training_loop(config, bridge, model, Path(root) / "records"):
                if isinstance(record, StepRecord) and record.step % arguments.every == 0:
                    show(record)
                elif isinstance(record, Evaluation):
                    print(f"      after {record.step} steps: sampled accuracy {record.sampled_train:.3f}")


def show(record: StepRecord) -> None:
    s, m = record.seconds, record.metrics
    times = "  ".join(f"{1e3 * x:5.1f} ms" for x in (s.generate, s.train, s.sync, record.sync.pause_seconds))
    transport = record.sync.engines[0].transport
    print(f"{record.step:4d}  {record.reward:.3f}  {times}   {transport:9s}  {m.ratio:.6f}  {m.gap:.1e}")
    if record.memory:
        held = ", ".join(f"{when} {num_bytes / 1e9:.2f} GB" for when, num_bytes in record.memory.items())
        print(f"      vLLM holds: {held}; sleep {1e3 * s.sleep:.0f} ms, wake {1e3 * s.wake:.0f} ms")


if __name__ == "__main__":
    main()
