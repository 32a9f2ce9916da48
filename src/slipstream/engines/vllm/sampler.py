"""Two logprobs for each token. vLLM reports those of the distribution that was sampled, or the model's own, for a whole
engine; an RL loss needs the first, and a look for mismatches both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.vllm.noise import Rows, install

GREEDY = 1e-5
"""Temperatures below this are greedy, as vLLM has it."""


class TwofoldSampler(Sampler):
    """A sampler whose logprobs have another order of columns: the drawn token's under the distribution that was sampled, its
    raw one, then the raw ones of the likeliest. So whoever wants k of these asks for k + 1. Greedy tokens have their
    raw logprob in both."""

    rows: Rows

    @classmethod
    def take_over(cls, runner: Any) -> Self:
        """From the runner's own sampler."""
        sampler = cls.__new__(cls)
        sampler.__dict__.update(runner.sampler.__dict__)
        sampler.rows = Rows(runner)
        runner.sampler = sampler
        install(runner, sampler.rows)
        return sampler

    def drawn(self) -> dict[str, int]:
        """Tokens of each request."""
        return self.rows.drawn()

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        count = sampling_metadata.max_num_logprobs
        if count is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        drawn_only = replace(sampling_metadata, max_num_logprobs=0)  # it need not look for the likeliest ones, too
        if count == 1 and self.rows.are_plain(len(logits)):  # both are the same: a look at the whole vocabulary less
            out = super().forward(logits, drawn_only, *args, **kwargs)
            ids, logprobs = out.logprobs_tensors.logprob_token_ids[:, :1], out.logprobs_tensors.logprobs[:, :1]
            twice = {"logprob_token_ids": ids.repeat(1, 2), "logprobs": logprobs.repeat(1, 2)}
            out.logprobs_tensors = out.logprobs_tensors._replace(**twice)
            return out
        raw = self.compute_logprobs(logits)  # before it is changed in place
        out = super().forward(logits, drawn_only, *args, **kwargs)
        found = out.logprobs_tensors
        token = found.logprob_token_ids[:, :1].long()
        own = raw.gather(-1, token)
        drawn = found.logprobs[:, :1]
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy or temperature is None:
            drawn = own
        else:
            drawn = torch.where(temperature[:, None] < GREEDY, own, drawn)
        top, top_ids = raw.topk(max(count - 1, 0), dim=-1)
        ids = torch.cat((token, token, top_ids), dim=1).to(found.logprob_token_ids.dtype)
        out.logprobs_tensors = found._replace(logprob_token_ids=ids, logprobs=torch.cat((drawn, own, top), dim=1))
        return out
