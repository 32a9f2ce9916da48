"""vLLM's scheduler, which hands over the tokens of a sample in parcels.

vLLM sends every token by itself from the process that makes them to the one that asked: at 512 sequences, packing and unpacking
these small messages takes longer than the GPU takes to make the tokens. A sample that nobody looks at before it is finished
(`RequestOutputKind.FINAL_ONLY`) can wait; what it has drawn goes out `PARCEL` tokens at a time, as if drawn in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

PARCEL = 32


class Parcels:
    """To be mixed into a scheduler of vLLM's."""

    requests: Mapping[str, Any]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._held: dict[str, list[Any]] = {}
        """What each sample has drawn since its last parcel."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        answers = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for answer in answers.values():  # one for each process that asks
            answer.outputs = [out for drawn in answer.outputs if (out := self._sent(drawn)) is not None]
        return {who: answer for who, answer in answers.items() if _says_something(answer)}

    def finish_requests(self, *args: Any, **named: Any) -> Any:
        found = super().finish_requests(*args, **named)  # type: ignore[misc]
        for name in [name for name in self._held if name not in self.requests]:
            del self._held[name]
        return found

    def _sent(self, drawn: Any) -> Any:
        """What is to be sent now, if anything."""
        name = drawn.request_id
        held = self._held.get(name, [])
        held.append(drawn)
        if drawn.finish_reason is None and len(held) < PARCEL and self._can_wait(self.requests[name]):
            self._held[name] = held
            return None
        self._held.pop(name, None)
        return joined(held)

    @staticmethod
    def _can_wait(request: Any) -> bool:
        params = request.sampling_params
        return (
            params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and params.prompt_logprobs is None
        )


def _says_something(answer: Any) -> bool:
    return bool(answer.outputs or answer.finished_requests or answer.scheduler_stats)


def joined(parts: list[Any]) -> Any:
    """One answer of what several steps have drawn for a sample."""
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if logprobs:
        ids, values, ranks = (np.concatenate([found[i] for found in logprobs]) for i in range(3))
        last.new_logprobs = LogprobsLists(ids, values, ranks)
    last.prefill_stats = first.prefill_stats  # only the first has it
    return last


class ParcelScheduler(Parcels, Scheduler):
    pass


class AsyncParcelScheduler(Parcels, AsyncScheduler):
    pass


def make(vllm_config: Any, **named: Any) -> Scheduler:
    """Where vLLM wants a class."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (AsyncParcelScheduler if ahead else ParcelScheduler)(vllm_config=vllm_config, **named)
