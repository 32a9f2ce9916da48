"""vLLM as a Slipstream engine, as a side of `decode.py`: in its own process, called by a trainer through the gateway.

Every sample is a request with its own length and seed. Results include both kinds of logprobs and the policy
version."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from decode_job import Case, Job, Round, mean, run_rounds, say, serve

import slipstream
from slipstream.config import VllmConfig
from slipstream.types import SamplingParams


def run(job: Job) -> dict[str, Any]:
    start = time.perf_counter()
    options = VllmConfig(
        max_num_seqs=job.max_samples,
        max_model_len=job.max_model_len,
        dtype=job.dtype,
        **job.options["engine"],
    )
    with tempfile.TemporaryDirectory() as root:
        run_dir = Path(root) / "run"
        with slipstream.launch(job.directory, engine=options, run_dir=run_dir, start_timeout=300) as bridge:
            start_seconds = time.perf_counter() - start
            say(f"gateway and vLLM started in {start_seconds:.0f} s")

            def generate(case: Case, prompts: list[list[int]]) -> Round:
                samplings = [SamplingParams(seed=i, **sampling) for i, sampling in enumerate(case.sampling())]
                start = time.perf_counter()
                answers = bridge.generate(prompts, samplings)
                seconds = time.perf_counter() - start
                logprobs = [logprob for answer in answers for logprob in answer.raw_logprobs]
                return Round(seconds, [list(a.token_ids) for a in answers], mean(logprobs))

            cases = run_rounds(job, generate)
    return {"versions": {"slipstream": slipstream.__version__}, "start_seconds": start_seconds, "cases": cases}


if __name__ == "__main__":
    serve(run)
