"""Batched output of tokens, over a stand-in for vLLM's scheduler."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.engines.pretend import imported, pretend


class Kind(enum.Enum):
    CUMULATIVE, FINAL_ONLY = range(2)


class LogprobsLists(NamedTuple):
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


class Scheduler:
    """At every step, each request draws the number of the step, until its limit."""

    def __init__(self, vllm_config: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.step = 0

    def add(self, name: str, limit: int, kind: Kind = Kind.FINAL_ONLY, prompt_logprobs: int | None = None) -> None:
        params = SimpleNamespace(output_kind=kind, prompt_logprobs=prompt_logprobs)
        self.requests[name] = SimpleNamespace(sampling_params=params, limit=limit, drawn=0)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        self.step += 1
        outputs = [self._draw(name, request) for name, request in list(self.requests.items())]
        return {0: SimpleNamespace(outputs=outputs, finished_requests=None, scheduler_stats=None)} if outputs else {}

    def _draw(self, name: str, request: Any) -> Any:
        request.drawn += 1
        ends = request.drawn == request.limit
        if ends:
            del self.requests[name]
        column = np.array([[self.step, self.step]], np.int32)
        return SimpleNamespace(
            request_id=name,
            new_token_ids=[self.step],
            new_logprobs=LogprobsLists(column, -column.astype(np.float32), np.array([1])),
            finish_reason="length" if ends else None,
            prefill_stats="of the prompt" if request.drawn == 1 else None,
        )

    def finish_requests(self, names: Any, status: Any) -> list[str]:
        for name in names:
            del self.requests[name]
        return list(names)


class AsyncScheduler(Scheduler):
    pass


@pytest.fixture
def batched_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    contents = {
        "vllm.sampling_params": {"RequestOutputKind": Kind},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.outputs": {"LogprobsLists": LogprobsLists},
    }
    pretend(monkeypatch, contents)
    with imported("slipstream.engines.vllm.batched_output") as module:
        monkeypatch.setattr(module, "remove_names", lambda: None)  # there are no workers
        yield module


def config(ahead: bool = False) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))


def steps(scheduler: Any, count: int) -> list[tuple[int, Any]]:
    """The outputs sent, with the step at which they were."""
    return [
        (scheduler.step, out)
        for _ in range(count)
        for answer in scheduler.update_from_output(None, None).values()
        for out in answer.outputs
    ]


def test_it_extends_the_scheduler_that_vllm_would_choose(batched_output: Any) -> None:
    assert isinstance(batched_output.make_scheduler(vllm_config=config(ahead=True)), AsyncScheduler)
    assert not isinstance(batched_output.make_scheduler(vllm_config=config()), AsyncScheduler)


def test_tokens_are_sent_in_full_batches_or_at_the_end(batched_output: Any) -> None:
    scheduler = batched_output.make_scheduler(vllm_config=config())
    limit = 2 * batched_output.BATCH_TOKENS + 3
    scheduler.add("a", limit)
    sent = steps(scheduler, limit)
    assert [at for at, _ in sent] == [batched_output.BATCH_TOKENS, 2 * batched_output.BATCH_TOKENS, limit]
    assert [token for _, out in sent for token in out.new_token_ids] == list(range(1, limit + 1))
    for _, out in sent:
        ids, logprobs, ranks, _ = out.new_logprobs
        assert ids[:, 0].tolist() == out.new_token_ids == (-logprobs[:, 1]).tolist()
        assert ids.shape == logprobs.shape == (len(out.new_token_ids), 2) and len(ranks) == len(ids)
    assert [out.finish_reason for _, out in sent] == [None, None, "length"]
    assert [out.prefill_stats for _, out in sent] == ["of the prompt", None, None]


def test_a_step_that_holds_all_outputs_sends_no_message(batched_output: Any) -> None:
    scheduler = batched_output.make_scheduler(vllm_config=config())
    scheduler.add("a", 10)
    assert scheduler.update_from_output(None, None) == {}


def test_streamed_and_scored_requests_are_not_held(batched_output: Any) -> None:
    scheduler = batched_output.make_scheduler(vllm_config=config())
    scheduler.add("streamed", 5, Kind.CUMULATIVE)
    scheduler.add("scored", 5, prompt_logprobs=1)
    scheduler.add("held", 5)
    sent = steps(scheduler, 5)
    assert [at for at, out in sent if out.request_id == "streamed"] == [1, 2, 3, 4, 5]
    assert [at for at, out in sent if out.request_id == "scored"] == [1, 2, 3, 4, 5]
    assert [(at, out.new_token_ids) for at, out in sent if out.request_id == "held"] == [(5, [1, 2, 3, 4, 5])]


def test_outputs_of_aborted_requests_are_dropped(batched_output: Any) -> None:
    scheduler = batched_output.make_scheduler(vllm_config=config())
    scheduler.add("a", 10)
    scheduler.add("b", 10)
    assert steps(scheduler, 3) == []
    assert scheduler.finish_requests(["a"], "aborted") == ["a"]
    scheduler.add("a", 2)  # a new request with the same id starts empty
    sent = {out.request_id: out.new_token_ids for _, out in steps(scheduler, 7)}
    assert sent == {"a": [4, 5], "b": list(range(1, 11))}


def test_outputs_without_logprobs_are_joined(batched_output: Any) -> None:
    parts = [SimpleNamespace(new_token_ids=[i], new_logprobs=None, prefill_stats=None) for i in range(3)]
    assert (
        batched_output.join_outputs(parts).new_token_ids == [0, 1, 2]
        and batched_output.join_outputs(parts[:1]) is parts[0]
    )
