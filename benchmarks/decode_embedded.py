"""The embedded engine as a side of `decode.py`, in-process. Every sample is a request with its own length and seed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jax
from decode_job import Case, Job, Round, mean, run_rounds, say, serve

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.compute import program_choice
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.types import Completion, Failure, Request, SamplingParams

GAUGES = ("num_programs", "compile_seconds", "cached_pages", "free_pages", "num_pages")
"""Gauges among the statistics. All others are counters, reported as the increase during a round."""


def run(job: Job) -> dict[str, Any]:
    program_choice.PATIENCE = 0  # no compilation after the warm-up, as late in a long run
    start = time.perf_counter()
    device = jax.devices()[0]
    device_seconds = time.perf_counter() - start
    sizes = {"max_num_seqs": job.max_samples, "max_model_len": job.max_model_len}
    options = EmbeddedConfig(dtype=job.dtype, **sizes | job.options["engine"])
    engine = EmbeddedEngine.from_directory(job.directory, options=options)
    start_seconds = time.perf_counter() - start
    say(f"engine started in {start_seconds:.0f} s on {device.device_kind}")

    runner = asyncio.Runner()

    def generate(case: Case, prompts: list[list[int]]) -> Round:
        requests = [
            Request(str(i), tuple(prompt), SamplingParams(seed=i, **sampling))
            for i, (prompt, sampling) in enumerate(zip(prompts, case.sampling(), strict=True))
        ]
        before = engine.stats()
        start = time.perf_counter()
        answers = runner.run(collect(engine, requests))
        seconds = time.perf_counter() - start
        logprobs = [logprob for answer in answers for logprob in answer.raw_logprobs]
        stats = difference(engine.stats(), before)
        return Round(seconds, [list(a.token_ids) for a in answers], mean(logprobs), stats)

    cases = run_rounds(job, generate)
    runner.run(engine.close())
    runner.close()
    versions = {"slipstream": slipstream.__version__, "jax": jax.__version__, "device": device.device_kind}
    seconds = {"device_seconds": device_seconds, "start_seconds": start_seconds}
    return {"versions": versions, **seconds, "cases": cases}


async def collect(engine: EmbeddedEngine, requests: list[Request]) -> list[Completion]:
    completions: dict[str, Completion] = {}
    async for batch in engine.generate(requests):
        for answer in batch:
            if isinstance(answer, Failure):
                raise answer.error
            if isinstance(answer, Completion):
                completions[answer.request_id] = answer
    return [completions[request.id] for request in requests]


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the increase of counters, and the current value of gauges."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict):
            result[name] = difference(value, before.get(name, {}))
        elif name in GAUGES or not isinstance(value, (int, float)):
            result[name] = value
        else:
            result[name] = value - before.get(name, 0)
    return result


if __name__ == "__main__":
    serve(run)
