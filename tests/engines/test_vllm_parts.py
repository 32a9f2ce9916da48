"""The parts of the vLLM engine that need no vLLM: which one this is, and its answers in our words."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engines.sequence import Sample, Ticket
from slipstream.engines.vllm import compat, noise
from slipstream.engines.vllm.words import take_scores, take_tokens
from slipstream.errors import ConfigError, EngineFailure
from slipstream.types import SamplingParams, TopLogprobs, VersionSpan
from tests.engines.pretend import pretend

# --- which vLLM ---

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

NAMES = {
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.v1.sample.sampler": "Sampler",
    "vllm.logprobs": "FlatLogprobs",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.outputs": "LogprobsLists",
    "vllm.v1.engine.exceptions": "EngineDeadError",
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM that has what is needed and nothing else."""

    class AsyncLLM:
        generate = pause_generation = resume_generation = reset_prefix_cache = collective_rpc = shutdown = None

    contents = {path: {name: AsyncLLM if name == "AsyncLLM" else object} for path, name in NAMES.items()}
    return pretend(monkeypatch, {"vllm": {"__version__": "0.32.1"}, **contents})


def test_a_tested_version_passes_without_a_word(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert compat.check() == "0.32.1"
    assert not caplog.records


def test_another_version_is_warned_of(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    modules["vllm"].__version__ = "0.99.0"
    with caplog.at_level(logging.WARNING):
        assert compat.check() == "0.99.0"
    assert "0.99.0 was never tested" in caplog.text and "tested are 0.26.x and 0.32.x" in caplog.text


def test_what_is_missing_is_named(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del modules["vllm.logprobs"].FlatLogprobs
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.1 has no vllm\.logprobs\.FlatLogprobs"):
        compat.check()
    modules["vllm.logprobs"].FlatLogprobs = object
    del modules["vllm.v1.engine.async_llm"].AsyncLLM.pause_generation
    with pytest.raises(ConfigError, match=r"AsyncLLM of vLLM 0\.32\.1 has no pause_generation"):
        compat.check()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="vLLM cannot be imported here"):
        compat.check()


@pytest.mark.parametrize(
    ("version", "on_cpu", "chosen"),
    [("0.26.0", False, {}), ("0.26.0", True, {RUNNER: "0"}), ("0.32.1", False, {RUNNER: "0"})],
)
def test_the_second_model_runner_is_used_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, version: str, on_cpu: bool, chosen: Any
) -> None:
    monkeypatch.setattr(compat, "is_cpu", lambda: on_cpu)
    monkeypatch.delenv(RUNNER, raising=False)
    assert compat.choose_runner(version) == chosen
    monkeypatch.setenv(RUNNER, "1")
    if chosen:
        with pytest.raises(
            ConfigError, match=rf"{RUNNER} asks for a model runner of vLLM {version} that we know of 0\.26"
        ):
            compat.choose_runner(version)
    else:
        assert compat.choose_runner(version) == {}


def test_workers_know_a_request_by_a_longer_name() -> None:
    assert compat.external_id("s17-9f3a0c2e") == compat.external_id("s17") == "s17"


# --- its answers ---


def columns(*rows: list[tuple[int, float]]) -> Any:
    """As vLLM's `FlatLogprobs`: for each position, tokens and their logprobs."""
    starts = [sum(map(len, rows[:i])) for i in range(len(rows))]
    return SimpleNamespace(
        start_indices=starts,
        end_indices=[start + len(row) for start, row in zip(starts, rows)],
        token_ids=[token for row in rows for token, _ in row],
        logprobs=[logprob for row in rows for _, logprob in row],
    )


def sample_of(limit: int = 9, top: int = 0, find_stop: Any = None) -> Sample:
    sampling = SamplingParams(max_tokens=9, top_logprobs=top)
    return Sample(Ticket("r", (1, 2, 3), sampling, 0, limit, (), None, find_stop=find_stop), 0)  # type: ignore[arg-type]


def drawn(*tokens: int, reason: str | None = "length", tops: tuple[tuple[int, float], ...] = ()) -> Any:
    rows = [[(token, -token / 10), (token, -token / 100), *tops] for token in tokens]
    return SimpleNamespace(token_ids=tokens, logprobs=columns(*rows), finish_reason=reason)


def test_every_token_gets_the_version_that_drew_it() -> None:
    sample = sample_of()
    take_tokens(sample, drawn(10, 11, 12, 13, 14), [(3, 0), (4, 2), (5, 4)])
    assert sample.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4), VersionSpan(5, 4, 5))
    assert sample.tokens == [10, 11, 12, 13, 14] and not sample.stopped
    assert sample.logprobs == [-1.0, -1.1, -1.2, -1.3, -1.4]
    assert sample.raw_logprobs == [-0.10, -0.11, -0.12, -0.13, -0.14]


def test_a_version_that_came_after_the_last_token_drew_none() -> None:
    sample = sample_of()
    take_tokens(sample, drawn(10, 11), [(3, 0), (4, 2)])
    assert sample.spans == (VersionSpan(3, 0, 2),)


def test_of_tokens_that_come_again_the_new_ones_are_taken() -> None:
    sample, tops = sample_of(top=2), ((7, -0.5), (8, -0.6))
    versions = [(3, 0)]
    take_tokens(sample, drawn(10, 11, reason=None, tops=tops), versions)
    versions.append((4, 3))  # swapped in before tokens that are under way arrived
    take_tokens(sample, drawn(10, 11, 12, 13, reason="stop", tops=tops), versions)
    assert sample.spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4))
    assert sample.stopped and sample.finish_reason == "stop"
    assert sample.tops == [TopLogprobs((7, 8), (-0.5, -0.6))] * 4


def test_other_columns_than_were_asked_for_are_not_guessed_at() -> None:
    with pytest.raises(EngineFailure, match="6 logprobs for 2 tokens; they have 2 each"):
        take_tokens(sample_of(), drawn(10, 11, tops=((7, -0.5),)), [(3, 0)])


def test_a_stop_text_cuts_what_was_drawn_after_it() -> None:
    sample = sample_of(find_stop=lambda tokens: 3 if len(tokens) >= 3 else None)
    take_tokens(sample, drawn(10, 11, reason=None), [(3, 0)])
    assert not sample.stopped
    take_tokens(sample, drawn(10, 11, 12, 13, reason=None), [(3, 0)])
    assert sample.stopped and sample.tokens == [10, 11, 12] and sample.spans == (VersionSpan(3, 0, 3),)


def test_a_score_has_a_logprob_for_every_token_but_the_first() -> None:
    sample = sample_of(limit=0, top=1)
    found = columns([], [(2, -0.2), (9, -0.1)], [(3, -0.3), (3, -0.3)])
    take_scores(sample, SimpleNamespace(prompt_logprobs=found), version=6)
    assert sample.raw_logprobs == [-0.2, -0.3]
    assert sample.tops == [TopLogprobs((9,), (-0.1,)), TopLogprobs((3,), (-0.3,))]
    assert sample.versions == [(6, 0)]


# --- who draws --------------------------------------------------------------------------------------------------------


class Runner:
    """What `Rows` looks at in vLLM's."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.device = SimpleNamespace(type="cpu")

    def add(self, name: str, drawn: int = 0, **extras: Any) -> None:
        params = SimpleNamespace(extra_args=extras or None)
        self.requests[name] = SimpleNamespace(sampling_params=params, output_token_ids=[7] * drawn)
        self.input_batch.req_ids.append(name)


def draws_of(rows: noise.Rows, count: int) -> dict[int, float] | None:
    found = rows.generators(count)
    return None if found is None else {row: float(torch.rand(1, generator=g)) for row, g in found.items()}


def test_what_a_row_draws_is_its_seeds_and_positions_whoever_is_beside_it() -> None:
    runner = Runner()
    rows = noise.Rows(runner)
    runner.add("a", 3, **{noise.SEED: 11})
    runner.add("b", 5, **{noise.SEED: 12})
    before = draws_of(rows, 2)
    assert before is not None and draws_of(rows, 2) == before
    runner.requests["a"].output_token_ids.append(7)  # the next step
    after = draws_of(rows, 2)
    assert after is not None and after[1] == before[1] and after[0] != before[0]
    runner.input_batch.req_ids = ["b", "a"]  # vLLM moves rows about
    assert draws_of(rows, 2) == {0: after[1], 1: after[0]}
    runner.input_batch.req_ids = ["b"]
    assert draws_of(rows, 1) == {0: after[1]}


def test_a_batch_with_a_row_that_has_no_seed_is_drawn_in_vllms_way() -> None:
    runner = Runner()
    rows = noise.Rows(runner)
    runner.add("a", **{noise.SEED: 11, noise.PLAIN: True})
    assert rows.are_plain(1) and draws_of(rows, 1) is not None
    runner.add("warm-up")
    assert not rows.are_plain(2) and draws_of(rows, 2) is None
    runner.input_batch.req_ids = ["a", "gone"]
    assert draws_of(rows, 2) is None
    runner.input_batch.req_ids = ["a"]
    assert draws_of(rows, 2) is None, "other rows than it knows of"
    assert rows.are_plain(1)


def test_one_row_that_is_not_plain_makes_a_batch_that_is_not() -> None:
    runner = Runner()
    rows = noise.Rows(runner)
    runner.add("a", **{noise.SEED: 11, noise.PLAIN: True})
    runner.add("b", **{noise.SEED: 12})
    assert not rows.are_plain(2)
    runner.input_batch.req_ids = ["a"]
    assert rows.are_plain(1)
