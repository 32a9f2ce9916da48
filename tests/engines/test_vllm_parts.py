"""Parts of the vLLM engine that need no vLLM: compatibility checks, request format, seeded sampling."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engines.frontend.sequence import EngineRequest, Sample
from slipstream.engines.vllm import compat, seeded_sampling
from slipstream.engines.vllm.request_format import take_scores, take_tokens
from slipstream.errors import ConfigError, EngineFailure
from slipstream.types import SamplingParams, TopLogprobs, VersionSpan
from tests.engines.pretend import pretend

# --- compatibility ---

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
    """A stand-in for vLLM that has what we need and nothing else."""

    class AsyncLLM:
        generate = encode = pause_generation = resume_generation = reset_prefix_cache = collective_rpc = shutdown = None

    contents = {path: {name: AsyncLLM if name == "AsyncLLM" else object} for path, name in NAMES.items()}
    return pretend(monkeypatch, {"vllm": {"__version__": "0.32.1"}, **contents})


def test_a_tested_version_passes_without_a_warning(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert compat.check() == "0.32.1"
    assert not caplog.records


def test_an_untested_version_logs_a_warning(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    modules["vllm"].__version__ = "0.99.0"
    with caplog.at_level(logging.WARNING):
        assert compat.check() == "0.99.0"
    assert "0.99.0 is untested" in caplog.text and "tested releases: 0.26.x and 0.32.x" in caplog.text


def test_missing_parts_of_vllm_are_named(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_v2_runner_is_used_where_it_is_supported(
    monkeypatch: pytest.MonkeyPatch, version: str, on_cpu: bool, chosen: Any
) -> None:
    monkeypatch.setattr(compat, "is_cpu", lambda: on_cpu)
    monkeypatch.delenv(RUNNER, raising=False)
    assert compat.choose_runner(version) == chosen
    monkeypatch.setenv(RUNNER, "1")
    if chosen:
        with pytest.raises(
            ConfigError,
            match=rf"{RUNNER} selects the V2 model runner of vLLM {version}; Slipstream supports that of 0\.26",
        ):
            compat.choose_runner(version)
    else:
        assert compat.choose_runner(version) == {}


def test_external_id_strips_the_suffix_of_workers() -> None:
    assert compat.external_id("s17-9f3a0c2e") == compat.external_id("s17") == "s17"


# --- request format ---


def columns(*rows: list[tuple[int, float]]) -> Any:
    """As vLLM's `FlatLogprobs`: for each position, tokens and their logprobs."""
    starts = [sum(map(len, rows[:i])) for i in range(len(rows))]
    return SimpleNamespace(
        start_indices=starts,
        end_indices=[start + len(row) for start, row in zip(starts, rows)],
        token_ids=[token for row in rows for token, _ in row],
        logprobs=[logprob for row in rows for _, logprob in row],
    )


def sample_of(limit: int = 9, top: int = 0, find_stop_string: Any = None) -> Sample:
    sampling = SamplingParams(max_tokens=9, top_logprobs=top)
    return Sample(EngineRequest("r", (1, 2, 3), sampling, 0, limit, (), None, find_stop_string=find_stop_string), 0)  # type: ignore[arg-type]


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


def test_a_version_after_the_last_token_has_no_span() -> None:
    sample = sample_of()
    take_tokens(sample, drawn(10, 11), [(3, 0), (4, 2)])
    assert sample.spans == (VersionSpan(3, 0, 2),)


def test_cumulative_outputs_add_only_new_tokens() -> None:
    sample, tops = sample_of(top=2), ((7, -0.5), (8, -0.6))
    versions = [(3, 0)]
    take_tokens(sample, drawn(10, 11, reason=None, tops=tops), versions)
    versions.append((4, 3))  # swapped in while tokens were in transit
    take_tokens(sample, drawn(10, 11, 12, 13, reason="stop", tops=tops), versions)
    assert sample.spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4))
    assert sample.stopped and sample.finish_reason == "stop"
    assert sample.top_logprobs == [TopLogprobs((7, 8), (-0.5, -0.6))] * 4


def test_a_wrong_number_of_logprob_columns_fails() -> None:
    with pytest.raises(EngineFailure, match="6 logprobs for 2 tokens; expected 2 each"):
        take_tokens(sample_of(), drawn(10, 11, tops=((7, -0.5),)), [(3, 0)])


def test_a_stop_string_drops_the_tokens_after_it() -> None:
    sample = sample_of(find_stop_string=lambda tokens: 3 if len(tokens) >= 3 else None)
    take_tokens(sample, drawn(10, 11, reason=None), [(3, 0)])
    assert not sample.stopped
    take_tokens(sample, drawn(10, 11, 12, 13, reason=None), [(3, 0)])
    assert sample.stopped and sample.tokens == [10, 11, 12] and sample.spans == (VersionSpan(3, 0, 3),)


def test_a_score_has_a_logprob_for_every_token_but_the_first() -> None:
    sample = sample_of(limit=0, top=1)
    found = columns([], [(2, -0.2), (9, -0.1)], [(3, -0.3), (3, -0.3)])
    take_scores(sample, SimpleNamespace(prompt_logprobs=found), version=6)
    assert sample.raw_logprobs == [-0.2, -0.3]
    assert sample.top_logprobs == [TopLogprobs((9,), (-0.1,)), TopLogprobs((3,), (-0.3,))]
    assert sample.versions == [(6, 0)]


# --- seeded sampling ---


class Runner:
    """What `SeededBatch` reads of vLLM's model runner."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.device = SimpleNamespace(type="cpu")

    def add(self, name: str, drawn: int = 0, **extras: Any) -> None:
        params = SimpleNamespace(extra_args=extras or None)
        self.requests[name] = SimpleNamespace(sampling_params=params, output_token_ids=[7] * drawn)
        self.input_batch.req_ids.append(name)


def draws_of(batch: seeded_sampling.SeededBatch, count: int) -> dict[int, float] | None:
    found = batch.generators(count)
    return None if found is None else {row: float(torch.rand(1, generator=g)) for row, g in found.items()}


def test_a_draw_depends_only_on_seed_and_position() -> None:
    runner = Runner()
    batch = seeded_sampling.SeededBatch(runner)
    runner.add("a", 3, **{seeded_sampling.SEED: 11})
    runner.add("b", 5, **{seeded_sampling.SEED: 12})
    before = draws_of(batch, 2)
    assert before is not None and draws_of(batch, 2) == before
    runner.requests["a"].output_token_ids.append(7)  # the next step
    after = draws_of(batch, 2)
    assert after is not None and after[1] == before[1] and after[0] != before[0]
    runner.input_batch.req_ids = ["b", "a"]  # vLLM reorders rows
    assert draws_of(batch, 2) == {0: after[1], 1: after[0]}
    runner.input_batch.req_ids = ["b"]
    assert draws_of(batch, 1) == {0: after[1]}


def test_a_batch_with_an_unseeded_row_uses_vllms_sampling() -> None:
    runner = Runner()
    batch = seeded_sampling.SeededBatch(runner)
    runner.add("a", **{seeded_sampling.SEED: 11, seeded_sampling.PLAIN: True})
    assert batch.is_plain(1) and draws_of(batch, 1) is not None
    runner.add("warm-up")
    assert not batch.is_plain(2) and draws_of(batch, 2) is None
    runner.input_batch.req_ids = ["a", "gone"]
    assert draws_of(batch, 2) is None
    runner.input_batch.req_ids = ["a"]
    assert draws_of(batch, 2) is None, "the number of rows does not match"
    assert batch.is_plain(1)


def test_a_batch_is_plain_only_if_all_rows_are() -> None:
    runner = Runner()
    batch = seeded_sampling.SeededBatch(runner)
    runner.add("a", **{seeded_sampling.SEED: 11, seeded_sampling.PLAIN: True})
    runner.add("b", **{seeded_sampling.SEED: 12})
    assert not batch.is_plain(2)
    runner.input_batch.req_ids = ["a"]
    assert batch.is_plain(1)
