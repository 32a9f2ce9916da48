"""Unmodified vLLM as a side of `decode.py`, on CPU or GPU, in its own environment.

Every sample is a request with its own length. Prefix caching is on. Requests have no seed, because with seeds vLLM
samples row by row, which is slower. On CPU it runs without compilation (`enforce_eager`), on GPU with CUDA graphs."""

from __future__ import annotations

import os
import time
from typing import Any

from decode_job import Case, Job, Round, run_rounds, say, serve


def run(job: Job) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    on_cpu = job.options["device"] == "cpu"
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # By default vLLM reserves a core for its scheduler process, which is half of a machine with two cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    start = time.perf_counter()
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"enforce_eager": True} if on_cpu else {}
    settings |= {
        "model": job.directory,
        "dtype": job.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_samples,
        "enable_prefix_caching": True,
    } | job.options.get("llm", {})
    engine = LLM(**settings)
    start_seconds = time.perf_counter() - start
    say(f"vLLM {vllm.__version__} started in {start_seconds:.0f} s")

    def generate(case: Case, prompts: list[list[int]]) -> Round:
        samplings = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in case.lengths
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        answers = [answer.outputs[0] for answer in engine.generate(requests, samplings, use_tqdm=False)]
        seconds = time.perf_counter() - start
        logprobs = [at[token].logprob for a in answers for token, at in zip(a.token_ids, a.logprobs)]
        return Round(seconds, [len(a.token_ids) for a in answers], sum(logprobs) / len(logprobs))

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return {"versions": versions, "start_seconds": start_seconds, "cases": run_rounds(job, generate)}


if __name__ == "__main__":
    serve(run)
