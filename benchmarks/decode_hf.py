"""`transformers` as a side of `decode.py`: one padded batch that runs until its longest row is done.

Logprobs are collected step by step, which costs less than keeping the scores of all steps."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from decode_job import Case, Job, Round, run_rounds, say, serve
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList


class Logprobs(LogitsProcessor):
    """Collects the logprob of each sampled token. Tokens are known one step after their logits."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids)
        self._last = scores.float().log_softmax(-1)
        return scores

    def take(self, input_ids: torch.Tensor) -> None:
        if self._last is not None:
            self.steps.append(self._last.gather(1, input_ids[:, -1:])[:, 0])


def run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(job.options["threads"])
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job.directory, dtype=getattr(torch, job.dtype)).eval()
    start_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def complete(prompts: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and logprobs, both `[rows, length]`."""
        logprobs, tokens = Logprobs(), torch.tensor(prompts)
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([logprobs]),
        )
        logprobs.take(out)
        return out[:, tokens.shape[1] :], torch.stack(logprobs.steps, 1)

    def generate(case: Case, prompts: list[list[int]]) -> Round:
        start = time.perf_counter()
        tokens, logprobs = complete(prompts, max(case.lengths))
        seconds = time.perf_counter() - start
        lengths = torch.tensor(case.lengths)
        wanted = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
        ids = [row[:length].tolist() for row, length in zip(tokens, case.lengths, strict=True)]
        return Round(seconds, ids, float(logprobs[wanted].mean()))

    def warm_up(case: Case) -> None:
        """Generate a few tokens, which suffices because nothing is compiled."""
        complete(case.prompts(job.num_ids, 0), 8)

    say(f"transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"versions": versions, "start_seconds": start_seconds, "cases": run_rounds(job, generate, warm_up)}


if __name__ == "__main__":
    serve(run)
