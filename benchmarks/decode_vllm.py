"""Unmodified vLLM as a side of `decode.py`, on CPU or GPU, in its own environment.

Every sample is a request with its own length. Prefix caching is on. Requests have no seed, because with seeds vLLM
samples row by row, which is slower. On CPU it runs without compilation (`enforce_eager`), on GPU with CUDA graphs."""

from __future__ import annotations

import os
import time
from typing import Any

from decode_job import Case, Job, Round, mean, run_rounds, say, serve


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

    import_seconds = time.perf_counter() - start
    settings: dict[str, Any] = {"enforce_eager": True} if on_cpu else {}
    settings |= {
        "model": job.directory,
        "dtype": job.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_samples,
        "enable_prefix_caching": True,
        "disable_log_stats": "speculative_config" not in job.options["llm"],  # they count accepted tokens
    } | job.options["llm"]
    engine = LLM(**settings)
    start_seconds = time.perf_counter() - start
    say(f"vLLM {vllm.__version__} started in {start_seconds:.0f} s")

    def generate(case: Case, prompts: list[list[int]]) -> Round:
        fixed = {"logprobs": 0 if case.logprobs else None, "detokenize": False}
        samplings = [SamplingParams(**fixed, **sampling) for sampling in case.sampling()]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        before = speculation(engine)
        start = time.perf_counter()
        answers = [answer.outputs[0] for answer in engine.generate(requests, samplings, use_tqdm=False)]
        seconds = time.perf_counter() - start
        logprobs = [at[token].logprob for a in answers for token, at in zip(a.token_ids, a.logprobs or [])]
        stats = {name: count - before[name] for name, count in speculation(engine).items()}
        return Round(seconds, [list(a.token_ids) for a in answers], mean(logprobs), stats)

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    seconds = {"import_seconds": import_seconds, "start_seconds": start_seconds}
    return {"versions": versions, **seconds, "cases": run_rounds(job, generate)}


def speculation(engine: Any) -> dict[str, int]:
    """Return vLLM's counts of draft tokens, by the embedded engine's names; nothing if it does not speculate."""
    if engine.llm_engine.vllm_config.speculative_config is None:
        return {}
    counts = {"drafted_tokens": 0, "accepted_tokens": 0}
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafted_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    }
    for metric in engine.get_metrics():
        if metric.name in names:
            counts[names[metric.name]] += metric.value
    return counts


if __name__ == "__main__":
    serve(run)
