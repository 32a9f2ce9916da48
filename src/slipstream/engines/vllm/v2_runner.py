"""The counterpart of `sampler` and `seeded_sampling` for vLLM's V2 model runner (`vllm.v1.worker.gpu`), the faster one.

The V2 runner keeps requests in numbered slots and samples with its own counter-based generator, keyed by the request's seed
and the token's position, so it only needs our seed. It knows lengths on the device only, and reading them would synchronize:
tokens are counted here as steps are launched."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from slipstream.engines.frontend.draw_rate import DrawRate
from slipstream.engines.vllm.seeded_sampling import PLAIN, SEED


class DualLogprobV2Sampler(Sampler):
    """Reports the same logprob columns as `sampler.DualLogprobSampler`."""

    _counts: np.ndarray
    """Tokens drawn, by slot."""
    _plain: np.ndarray
    """By slot: whether the request samples the model's own distribution."""
    draw_rate: DrawRate
    _preempted_counts: dict[str, int]
    """Tokens drawn by preempted requests, which have no slot until they are resumed."""
    _sampled: tuple[torch.Tensor, torch.Tensor]
    """The current step's tokens, and the logits they were drawn from."""

    @classmethod
    def replace_sampler(cls, runner: Any) -> Self:
        """Replace the runner's sampler, keeping its state. Call before the first request."""
        sampler = cls.__new__(cls)
        sampler.__dict__.update(runner.sampler.__dict__)
        sampler._counts = np.zeros(runner.max_num_reqs, np.int64)
        sampler._plain = np.zeros(runner.max_num_reqs, bool)
        sampler._preempted_counts, sampler.draw_rate = {}, DrawRate()
        runner.sampler = sampler
        original = runner.finish_requests

        def finish_requests(scheduler_output: Any) -> None:
            sampler._release_slots(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ())
            original(scheduler_output)

        runner.finish_requests = finish_requests
        return sampler

    def token_counts(self) -> dict[str, int]:
        """Return how many tokens each request has drawn, steps that are launched and not yet computed included."""
        slots = self.req_states.req_id_to_index.items()
        return self._preempted_counts | {request_id: int(self._counts[slot]) for request_id, slot in slots}

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        super().add_request(req_idx, prompt_len, sampling_params)
        extras = sampling_params.extra_args or {}
        if SEED in extras:
            self.sampling_states.seeds.np[req_idx] = extras[SEED]
            self.sampling_states.seeds_set[req_idx] = True
        self._plain[req_idx] = PLAIN in extras
        # A resumed request brings the tokens it had drawn as part of its prefill.
        self._counts[req_idx] = self.req_states.prefill_len.np[req_idx] - prompt_len
        self._preempted_counts.pop(self.req_states.index_to_req_id[req_idx], None)

    def _release_slots(self, finished: Collection[str], preempted: Collection[str]) -> None:
        for request_id in preempted:
            if (slot := self.req_states.req_id_to_index.get(request_id)) is not None:
                self._preempted_counts[request_id] = int(self._counts[slot])
        for request_id in finished:
            self._preempted_counts.pop(request_id, None)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        slots = input_batch.idx_mapping_np
        count = self.sampling_states.max_num_logprobs(slots)
        needs_raw = count != NO_LOGPROBS and not self._plain[slots].all()
        raw = logits.clone() if needs_raw else logits  # sampling changes the logits in place
        out = super().__call__(logits, input_batch)
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        draws = computed >= input_batch.prefill_len_np  # a partial prefill draws nothing
        self._counts[slots] += draws
        self.draw_rate.step(int(draws.sum()))
        if count != NO_LOGPROBS:
            is_greedy = None
            if needs_raw:
                is_greedy = self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping] == 0
            out.logprobs_tensors = self._logprobs(raw, is_greedy, max(count - 1, 0))
        return out

    def returns_logprobs(self, idx_mapping_np: np.ndarray) -> bool:
        return False  # `__call__` adds them

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._sampled = super().sample(*args, **kwargs)
        return self._sampled

    def _logprobs(self, raw: torch.Tensor, is_greedy: torch.Tensor | None, num_top: int) -> LogprobsTensors:
        """`is_greedy` flags greedy rows; None if all rows sample the model's own distribution."""
        sampled, processed = self._sampled
        token = ids = sampled.long()[:, None]
        if num_top:
            ids = torch.cat((token, raw.topk(num_top, dim=-1).indices), dim=1)
        raw_logprobs = compute_token_logprobs(raw, ids)
        token_sampled = raw_logprobs[:, :1]
        if is_greedy is not None:
            token_sampled = torch.where(is_greedy[:, None], token_sampled, compute_token_logprobs(processed, token))
        return LogprobsTensors(
            logprob_token_ids=torch.cat((token, ids), dim=1),
            logprobs=torch.cat((token_sampled, raw_logprobs), dim=1),
            selected_token_ranks=torch.zeros_like(sampled),  # unused
        )
