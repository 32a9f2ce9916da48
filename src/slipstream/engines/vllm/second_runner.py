"""What `sampler` and `noise` are, for vLLM's second model runner (`vllm.v1.worker.gpu`), which is the faster one.

It keeps its requests in numbered slots, and draws with a counter-based generator of its own, keyed by a request's seed and the
token's position: so that what a request draws depends on nothing else, it needs a seed of ours and no more. It knows lengths on
the device only, where asking means waiting: so tokens are counted here, as steps are launched."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from slipstream.engines.vllm.noise import PLAIN, SEED


class TwofoldSlots(Sampler):
    """As `sampler.TwofoldSampler`: the logprobs of a token are those under the distribution that was sampled, its raw one, then
    the raw ones of the likeliest."""

    _drawn: np.ndarray
    """Tokens, by slot."""
    _plain: np.ndarray
    """By slot: whether it draws from the model's own distribution."""
    _aside: dict[str, int]
    """What requests without a slot had drawn when they lost it: they were preempted, and come back."""
    _found: tuple[torch.Tensor, torch.Tensor]
    """Of the step under way: the tokens, and the logits that they were drawn from."""

    @classmethod
    def take_over(cls, runner: Any) -> Self:
        """From the runner's own sampler, before there is a request."""
        sampler = cls.__new__(cls)
        sampler.__dict__.update(runner.sampler.__dict__)
        sampler._drawn = np.zeros(runner.max_num_reqs, np.int64)
        sampler._plain = np.zeros(runner.max_num_reqs, bool)
        sampler._aside = {}
        runner.sampler = sampler
        theirs = runner.finish_requests

        def finish_requests(scheduler_output: Any) -> None:
            sampler._leave(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ())
            theirs(scheduler_output)

        runner.finish_requests = finish_requests
        return sampler

    def drawn(self) -> dict[str, int]:
        """Tokens of each request, those of steps that the device has yet to come to included."""
        slots = self.req_states.req_id_to_index.items()
        return self._aside | {name: int(self._drawn[slot]) for name, slot in slots}

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        super().add_request(req_idx, prompt_len, sampling_params)
        extras = sampling_params.extra_args or {}
        if SEED in extras:
            self.sampling_states.seeds.np[req_idx] = extras[SEED]
            self.sampling_states.seeds_set[req_idx] = True
        self._plain[req_idx] = PLAIN in extras
        # One that was preempted brings what it had drawn, as if it were prompt.
        self._drawn[req_idx] = self.req_states.prefill_len.np[req_idx] - prompt_len
        self._aside.pop(self.req_states.index_to_req_id[req_idx], None)

    def _leave(self, finished: Collection[str], preempted: Collection[str]) -> None:
        for name in preempted:
            if (slot := self.req_states.req_id_to_index.get(name)) is not None:
                self._aside[name] = int(self._drawn[slot])
        for name in finished:
            self._aside.pop(name, None)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        slots = input_batch.idx_mapping_np
        count = self.sampling_states.max_num_logprobs(slots)
        changed = count != NO_LOGPROBS and not self._plain[slots].all()
        raw = logits.clone() if changed else logits  # what follows works in place
        out = super().__call__(logits, input_batch)
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        self._drawn[slots] += computed >= input_batch.prefill_len_np  # else there is more of the prompt to come
        if count != NO_LOGPROBS:
            is_greedy = None
            if changed:
                is_greedy = self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping] == 0
            out.logprobs_tensors = self._logprobs(raw, is_greedy, max(count - 1, 0))
        return out

    def returns_logprobs(self, idx_mapping_np: np.ndarray) -> bool:
        return False  # they are added to what comes of it

    def sample(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._found = super().sample(*args, **named)
        return self._found

    def _logprobs(self, raw: torch.Tensor, is_greedy: torch.Tensor | None, num_top: int) -> LogprobsTensors:
        """`is_greedy` says it of each row, unless all draw from the model's own distribution."""
        sampled, processed = self._found
        token = ids = sampled.long()[:, None]
        if num_top:
            ids = torch.cat((token, raw.topk(num_top, dim=-1).indices), dim=1)
        own = compute_token_logprobs(raw, ids)
        drawn = own[:, :1]
        if is_greedy is not None:
            drawn = torch.where(is_greedy[:, None], drawn, compute_token_logprobs(processed, token))
        return LogprobsTensors(
            logprob_token_ids=torch.cat((token, ids), dim=1),
            logprobs=torch.cat((drawn, own), dim=1),
            selected_token_ranks=torch.zeros_like(sampled),  # nobody asks
        )
