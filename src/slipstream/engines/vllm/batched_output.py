"""A vLLM scheduler that sends the tokens of a sample in batches.

vLLM sends every token in its own message from the engine core to the client. At 512 sequences, packing and unpacking these
messages takes longer than the GPU takes to compute the tokens. A sample that is only read once it is finished
(`RequestOutputKind.FINAL_ONLY`) can wait: its tokens are sent `BATCH_TOKENS` at a time, as if drawn in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from slipstream.engines.vllm.shared_names import remove_names

BATCH_TOKENS = 32


class BatchedOutputMixin:
    """Mixed into one of vLLM's schedulers."""

    requests: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[Any]] = {}
        """Outputs not sent yet, by request id."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        by_client = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for message in by_client.values():
            message.outputs = [out for step in message.outputs if (out := self._to_send(step)) is not None]
        return {client: message for client, message in by_client.items() if not _is_empty(message)}

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request_id in [request_id for request_id in self._held if request_id not in self.requests]:
            del self._held[request_id]
        return finished

    def _to_send(self, output: Any) -> Any:
        """Return what to send for a request after this step, or None while its tokens are held."""
        request_id = output.request_id
        held = self._held.get(request_id, [])
        held.append(output)
        if output.finish_reason is None and len(held) < BATCH_TOKENS and self._can_wait(self.requests[request_id]):
            self._held[request_id] = held
            return None
        self._held.pop(request_id, None)
        return join_outputs(held)

    @staticmethod
    def _can_wait(request: Any) -> bool:
        params = request.sampling_params
        return (
            params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and params.prompt_logprobs is None
        )


def _is_empty(message: Any) -> bool:
    return not (message.outputs or message.finished_requests or message.scheduler_stats)


def join_outputs(steps: list[Any]) -> Any:
    """Join the outputs of consecutive steps of one request into one."""
    if len(steps) == 1:
        return steps[0]
    first, last = steps[0], steps[-1]
    last.new_token_ids = [token for step in steps for token in step.new_token_ids]
    logprobs = [step.new_logprobs for step in steps if step.new_logprobs is not None]
    if logprobs:
        ids, values, ranks = (np.concatenate([columns[i] for columns in logprobs]) for i in range(3))
        last.new_logprobs = LogprobsLists(ids, values, ranks)
    last.prefill_stats = first.prefill_stats  # only the first step carries them
    return last


class BatchedOutputScheduler(BatchedOutputMixin, Scheduler):
    pass


class AsyncBatchedOutputScheduler(BatchedOutputMixin, AsyncScheduler):
    pass


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Stand in for the class that vLLM expects as `scheduler_cls`. Runs in the engine core, when the workers are up."""
    remove_names()
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncBatchedOutputScheduler if is_async else BatchedOutputScheduler)(vllm_config=vllm_config, **kwargs)
