"""A vLLM sampler that reports two logprobs per token: under the sampled distribution, and under the model's own.

vLLM reports one kind or the other for a whole engine. An RL loss needs the first; mismatch diagnosis needs both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.vllm.seeded_sampling import SeededBatch, install

GREEDY_TEMPERATURE = 1e-5
"""vLLM treats temperatures below this as greedy."""


class DualLogprobSampler(Sampler):
    """Logprob columns of each token: its logprob under the sampled distribution, its raw logprob, then the raw logprobs of
    the likeliest tokens. A request for k of the likeliest therefore asks vLLM for k + 1. Greedy tokens carry their raw
    logprob in both columns."""

    batch: SeededBatch

    @classmethod
    def replace_sampler(cls, runner: Any) -> Self:
        """Replace the runner's sampler, keeping its state."""
        sampler = cls.__new__(cls)
        sampler.__dict__.update(runner.sampler.__dict__)
        sampler.batch = SeededBatch(runner)
        runner.sampler = sampler
        install(runner, sampler.batch)
        return sampler

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        count = sampling_metadata.max_num_logprobs
        if count is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        drawn_only = replace(sampling_metadata, max_num_logprobs=0)  # we find the likeliest tokens ourselves
        if count == 1 and self.batch.is_plain(len(logits)):
            # Both logprobs are equal: skip one pass over the vocabulary.
            out = super().forward(logits, drawn_only, *args, **kwargs)
            ids, logprobs = out.logprobs_tensors.logprob_token_ids[:, :1], out.logprobs_tensors.logprobs[:, :1]
            doubled = {"logprob_token_ids": ids.repeat(1, 2), "logprobs": logprobs.repeat(1, 2)}
            out.logprobs_tensors = out.logprobs_tensors._replace(**doubled)
            return out
        raw = self.compute_logprobs(logits)  # before sampling changes the logits in place
        out = super().forward(logits, drawn_only, *args, **kwargs)
        columns = out.logprobs_tensors
        token = columns.logprob_token_ids[:, :1].long()
        token_raw = raw.gather(-1, token)
        token_sampled = columns.logprobs[:, :1]
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy or temperature is None:
            token_sampled = token_raw
        else:
            token_sampled = torch.where(temperature[:, None] < GREEDY_TEMPERATURE, token_raw, token_sampled)
        top, top_ids = raw.topk(max(count - 1, 0), dim=-1)
        ids = torch.cat((token, token, top_ids), dim=1).to(columns.logprob_token_ids.dtype)
        logprobs = torch.cat((token_sampled, token_raw, top), dim=1)
        out.logprobs_tensors = columns._replace(logprob_token_ids=ids, logprobs=logprobs)
        return out
