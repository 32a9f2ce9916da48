"""A vLLM sampler that reports two logprobs per token: under the sampled distribution, and under the model's own.

vLLM reports one kind or the other for a whole engine. An RL loss needs the first; mismatch diagnosis needs both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.vllm import compat
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
        if getattr(runner, "rejection_sampler", None) is not None:
            runner.rejection_sampler = DualLogprobRejectionSampler.of(runner.rejection_sampler, sampler)
        return sampler

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self.batch.draw_rate.step(len(logits))  # with speculation, a step draws at least that
        count = sampling_metadata.max_num_logprobs
        if count is None or kwargs.get(
            "predict_bonus_token"
        ):  # for the rejection sampler, which reports logprobs itself
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


class DualLogprobRejectionSampler(RejectionSampler):
    """Reports the columns of `DualLogprobSampler` for the tokens of a speculative step."""

    _temperature: torch.Tensor | None
    """Temperature of each request of the step; None if all are greedy."""

    @classmethod
    def of(cls, original: RejectionSampler, sampler: DualLogprobSampler) -> Self:
        """Return a copy of `original` that draws with `sampler`."""
        rejection = cls.__new__(cls)
        rejection.__dict__.update(original.__dict__)
        rejection.sampler = sampler
        if compat.is_cpu():  # there vLLM's own expands integers, such as top_k, to garbage
            rejection_sampler.expand_batch_to_tokens = _expand
        return rejection

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if not len(metadata.draft_token_ids):  # nothing was proposed to any request; vLLM's own code fails then
            return self.sampler(logits, sampling_metadata)
        self._temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> LogprobsTensors:
        """`target_logits` and `bonus_logits` are those that were sampled from, `logits` the model's own."""
        columns = super()._get_logprobs_tensors
        raw_parts = logits[metadata.target_logits_indices], logits[metadata.bonus_logits_indices]
        sampled = columns(0, metadata, logits, target_logits, bonus_logits, sampled_token_ids).logprobs
        raw = columns(max(max_num_logprobs - 1, 0), metadata, logits, *raw_parts, sampled_token_ids)
        if self._temperature is None:
            sampled = raw.logprobs[:, :1]
        else:
            is_greedy = (self._temperature < GREEDY_TEMPERATURE).repeat_interleave(sampled_token_ids.shape[-1])
            sampled = torch.where(is_greedy[:, None], raw.logprobs[:, :1], sampled)
        ids = torch.cat((raw.logprob_token_ids[:, :1], raw.logprob_token_ids), dim=1)
        return raw._replace(logprob_token_ids=ids, logprobs=torch.cat((sampled, raw.logprobs), dim=1))


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat the value of each request for each of its tokens, of which `cu_num_tokens` is the running sum."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    repeated = x.repeat_interleave(counts, output_size=num_tokens)
    return repeated.masked_fill(repeated == replace_from, replace_to)
