"""Sync weights to an engine in another process and generate; every token carries the policy version that produced it.

    python examples/hello_offload.py

Prints completions before and after a weight sync, and checks that an engine inside this process samples the same tokens
from the same weights and seed."""

from __future__ import annotations

import tempfile

import jax

import slipstream
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.transformer import decoder

PROMPTS = ["123=", "708=", "46="]
SAMPLING = slipstream.SamplingParams(max_tokens=6, n=2, seed=7)


def main() -> None:
    with tempfile.TemporaryDirectory() as model:
        config = write_sample_config(model)  # config.json and tokenizer.json of a small decoder, no weights
        old, new = (decoder.init(config, jax.random.key(seed)) for seed in (0, 1))
        hf_weights.save(model, old, config)  # the engines load version 0 at startup

        with slipstream.launch(model=model, engines=1) as bridge, slipstream.inprocess(model=model) as here:
            for params in (None, new):
                if params is not None:
                    report = bridge.sync(params)
                    here.sync(params)
                    print(f"\nsynced {report.num_bytes:,} bytes in {report.total_seconds * 1e3:.1f} ms\n")
                completions = bridge.generate(PROMPTS, SAMPLING)
                for c in completions:
                    print(f"version {c.version}  {c.engine}  {PROMPTS[c.prompt_index]!r} → {c.text!r}")
                same = [c.token_ids for c in completions] == [c.token_ids for c in here.generate(PROMPTS, SAMPLING)]
                print(f"same tokens as the in-process engine: {same}")
                if not same:
                    raise SystemExit("the engines sampled different tokens")


if __name__ == "__main__":
    main()
