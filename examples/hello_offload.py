"""Two processes: weights go over, completions come back, each token stamped with the policy version that made it.

    python examples/hello_offload.py

Prints completions before and after a weight sync, and checks that they are the very tokens that an engine inside this
process draws from the same weights and seed."""

from __future__ import annotations

import tempfile

import jax

import slipstream
from slipstream.model import checkpoint, decoder
from slipstream.rl.tokens import write_small_model

PROMPTS = ["123=", "708=", "46="]
SAMPLING = slipstream.SamplingParams(max_tokens=6, n=2, seed=7)


def main() -> None:
    with tempfile.TemporaryDirectory() as model:
        config = write_small_model(model)  # a small decoder's config.json and tokenizer.json; no weights
        old, new = (decoder.init(config, jax.random.key(seed)) for seed in (0, 1))
        checkpoint.save(model, old, config)  # version 0 is what the engines load when they start

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
                print(f"equal to the in-process engine's: {same}")
                if not same:
                    raise SystemExit("the two engines differ")


if __name__ == "__main__":
    main()
