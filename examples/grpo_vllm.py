"""GRPO with the trainer in JAX and rollouts in stock vLLM: every step's weights go to vLLM's workers.

    slipstream setup vllm --cpu            # once: an environment with vLLM; or name one with --python
    python examples/grpo_vllm.py [--steps 60] [--python /path/to/python]

Prints for each tenth step the reward, where the time went, and how far the trainer's logprobs of the sampled tokens are from
those that vLLM reported: `ratio` is the mean of their quotient, exactly 1 if the two were one model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import slipstream
from slipstream.config import EngineConfig, TrainConfig
from slipstream.rl.loop import train
from slipstream.rl.records import Evaluation, StepRecord
from slipstream.rl.tokens import write_small_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--python", default="", help="interpreter of an environment with vLLM")
    arguments = parser.parse_args()
    engine = EngineConfig(kind="vllm", python=arguments.python, max_concurrency=256, max_model_len=32)
    config = TrainConfig(steps=arguments.steps, eval_every=arguments.steps, engine=engine)
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        write_small_model(model)
        with slipstream.launch(model, engine=engine, run_dir=Path(root) / "run") as bridge:
            print("step  reward   generate    train     sync   ratio to vLLM's logprobs")
            for record in train(config, bridge, model, Path(root) / "records"):
                if isinstance(record, StepRecord) and record.step % 10 == 0:
                    s = record.seconds
                    times = "  ".join(f"{1e3 * x:5.0f} ms" for x in (s.generate, s.train, s.sync))
                    print(f"{record.step:4d}  {record.reward:.3f}  {times}   {record.metrics.ratio:.6f}")
                elif isinstance(record, Evaluation):
                    print(f"      after {record.step} steps: sampled accuracy {record.sampled_train:.3f}")


if __name__ == "__main__":
    main()
