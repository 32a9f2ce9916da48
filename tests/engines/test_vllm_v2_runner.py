"""Our sampler for vLLM's V2 model runner, over a torch stand-in for vLLM's sampler, which needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slipstream.engines.vllm.seeded_sampling import PLAIN, SEED
from tests.engines.pretend import imported, pretend

ROOM, VOCABULARY = 4, 6


class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class Sampler:
    """Divides the logits by the temperature, in place, and takes the likeliest token."""

    def __init__(self) -> None:
        self.req_states: Any = States()
        self.sampling_states = SimpleNamespace(
            seeds=SimpleNamespace(np=np.zeros(ROOM, np.int64)),
            seeds_set=np.zeros(ROOM, bool),
            temperature=SimpleNamespace(gpu=torch.ones(ROOM)),
            num_logprobs=np.full(ROOM, -1),
            max_num_logprobs=lambda slots: int(self.sampling_states.num_logprobs[slots].max()),
        )

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.sampling_states.temperature.gpu[req_idx] = sampling_params.temperature
        self.sampling_states.num_logprobs[req_idx] = sampling_params.logprobs

    def returns_logprobs(self, slots: np.ndarray) -> bool:
        return True

    def sample(self, logits: torch.Tensor, slots: Any) -> tuple[torch.Tensor, torch.Tensor]:
        temperature = self.sampling_states.temperature.gpu[slots][:, None]
        logits.div_(torch.where(temperature == 0, 1.0, temperature))
        return logits.argmax(-1), logits

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        assert not self.returns_logprobs(input_batch.idx_mapping_np)
        sampled, _ = self.sample(logits, input_batch.expanded_idx_mapping)
        return SimpleNamespace(sampled_token_ids=sampled[:, None], logprobs_tensors=None)


class States:
    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        self.prefill_len = SimpleNamespace(np=np.zeros(ROOM, np.int32))


class Runner:
    """The parts of vLLM's model runner that the sampler uses."""

    max_num_reqs = ROOM

    def __init__(self, module: Any) -> None:
        self.sampler: Any = Sampler()
        self.states = self.sampler.req_states
        self.computed = np.zeros(ROOM, np.int32)
        self.slots = module.DualLogprobV2Sampler.replace_sampler(self)

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            del self.states.index_to_req_id[self.states.req_id_to_index.pop(name)]

    def add(
        self, name: str, prompt: int, drawn: int = 0, logprobs: int = 1, temperature: float = 1.0, **extra: Any
    ) -> None:
        slot = min(set(range(ROOM)) - set(self.states.index_to_req_id))
        self.states.req_id_to_index[name], self.states.index_to_req_id[slot] = slot, name
        self.states.prefill_len.np[slot], self.computed[slot] = prompt + drawn, 0
        params = SimpleNamespace(extra_args=extra or None, temperature=temperature, logprobs=logprobs)
        self.sampler.add_request(slot, prompt, params)

    def step(
        self, logits: torch.Tensor | None = None, finished: Any = (), preempted: Any = (), **scheduled: int
    ) -> Any:
        """Schedule this many tokens of each request."""
        self.finish_requests(SimpleNamespace(finished_req_ids=set(finished), preempted_req_ids=set(preempted)))
        slots = np.array([self.states.req_id_to_index[name] for name in scheduled])
        counts = np.array(list(scheduled.values()))
        batch = SimpleNamespace(
            idx_mapping_np=slots,
            expanded_idx_mapping=torch.tensor(slots),
            num_computed_tokens_np=self.computed[slots],
            num_scheduled_tokens=counts,
            prefill_len_np=self.states.prefill_len.np[slots],
        )
        found = self.sampler(torch.zeros(len(slots), VOCABULARY) if logits is None else logits, batch)
        self.computed[slots] += counts
        return found


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    def compute_token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, ids)

    contents: dict[str, dict[str, Any]] = {
        "vllm.v1.outputs": {"LogprobsTensors": LogprobsTensors},
        "vllm.v1.worker.gpu.sample.logprob": {"compute_token_logprobs": compute_token_logprobs},
        "vllm.v1.worker.gpu.sample.sampler": {"Sampler": Sampler},
        "vllm.v1.worker.gpu.sample.states": {"NO_LOGPROBS": -1},
    }
    pretend(monkeypatch, contents)
    with imported("slipstream.engines.vllm.v2_runner") as module:
        yield Runner(module)


def test_tokens_are_counted_as_steps_are_launched(runner: Runner) -> None:
    runner.add("a", prompt=5)
    runner.step(a=3)
    assert runner.slots.token_counts() == {"a": 0}, "its prefill is incomplete"
    runner.add("b", prompt=2)
    runner.step(a=2, b=2)
    runner.step(a=1, b=1)
    runner.step(b=1)
    assert runner.slots.token_counts() == {"a": 2, "b": 3}
    runner.step(finished=["a"], b=1)
    assert runner.slots.token_counts() == {"b": 4}
    assert [tokens for tokens, _ in runner.slots.draw_rate._steps] == [2, 2, 1, 1], "that of the first step has no time"


def test_preempted_requests_keep_their_count(runner: Runner) -> None:
    runner.add("a", prompt=2)
    runner.add("b", prompt=2)
    runner.step(a=2, b=2)
    runner.step(a=1, b=1)
    runner.step(preempted=["a"], b=1)
    assert runner.slots.token_counts() == {"a": 2, "b": 3}
    runner.add("c", prompt=1)  # takes its slot
    runner.step(c=1, b=1)
    assert runner.slots.token_counts() == {"a": 2, "b": 4, "c": 1}
    runner.add("a", prompt=2, drawn=2)
    runner.step(a=3)
    assert runner.slots.token_counts()["a"] == 2, "its tokens are recomputed"
    runner.step(a=1)
    assert runner.slots.token_counts()["a"] == 3
    runner.step(preempted=["b"], a=1)
    runner.step(finished=[], a=1)
    assert runner.slots.token_counts()["b"] == 4
    runner.slots._release_slots(["b"], ())  # aborted while it had no slot
    assert "b" not in runner.slots.token_counts()


def test_requests_draw_with_our_seed(runner: Runner) -> None:
    runner.add("ours", prompt=1, **{SEED: 77})
    runner.add("not ours", prompt=1)
    states = runner.sampler.sampling_states
    assert states.seeds.np[:2].tolist() == [77, 0] and states.seeds_set[:2].tolist() == [True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("num_top", [0, 2])
def test_a_token_has_its_sampled_and_its_raw_logprob(runner: Runner, temperature: float, num_top: int) -> None:
    plain = {PLAIN: True} if temperature == 1.0 else {}
    runner.add("a", 1, logprobs=1 + num_top, temperature=temperature, **plain)
    runner.add("b", 1, logprobs=1 + num_top, **{PLAIN: True})
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(3))
    raw = logits.log_softmax(-1)
    drawn = (logits / (temperature or 1.0)).log_softmax(-1) if temperature else raw
    found = runner.step(logits.clone(), a=1, b=1).logprobs_tensors
    token = logits.argmax(-1)
    tops = raw.topk(num_top)
    wanted_ids = torch.cat((token[:, None], token[:, None], tops.indices), 1)
    wanted = torch.cat(
        (torch.stack((drawn[0], raw[1])).gather(1, token[:, None]), raw.gather(1, token[:, None]), tops.values), 1
    )
    assert found.logprob_token_ids.tolist() == wanted_ids.tolist()
    torch.testing.assert_close(found.logprobs, wanted)
    assert len(found.selected_token_ranks) == 2


def test_requests_without_logprobs_get_none(runner: Runner) -> None:
    runner.add("scored", prompt=3, logprobs=-1)
    assert runner.step(scored=3).logprobs_tensors is None
