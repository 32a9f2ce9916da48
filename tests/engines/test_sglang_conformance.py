"""Conformance suite with the engine for SGLang servers, against the stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.config import RemoteConfig
from slipstream.engines.remote.engine import RemoteEngine
from slipstream.model.checkpoints import hf_weights
from tests.conformance.engines import (
    Subject,
    assert_truncated,
    # Those of the suite that need no memory of ours to land in.
    test_a_bad_prompt_fails_alone,  # noqa: F401
    test_a_logit_bias_forces_or_bans_tokens,  # noqa: F401
    test_a_sleeping_engine_releases_memory_and_continues_after_waking,  # noqa: F401
    test_a_stop_token_is_the_last_one,  # noqa: F401
    test_an_update_changes_what_is_generated_and_scored,  # noqa: F401
    test_closing_the_iterator_cancels_the_rest,  # noqa: F401
    test_commits_with_requests_in_flight,  # noqa: F401
    test_description_fits_the_model,  # noqa: F401
    test_greedy_is_the_argmax_of_the_reference,  # noqa: F401
    test_logprobs_are_those_of_the_reference,  # noqa: F401
    test_no_stop_token_comes_before_the_minimum,  # noqa: F401
    test_nothing_changes_before_commit_nor_after_rollback,  # noqa: F401
    test_one_seed_gives_one_set_of_samples,  # noqa: F401
    test_pause_and_resume_do_not_change_tokens,  # noqa: F401
    test_progress_is_a_prefix_of_the_completion,  # noqa: F401
    test_resetting_the_prefix_cache_changes_no_token,  # noqa: F401
    test_scores_are_the_raw_logprobs_of_the_reference,  # noqa: F401
    test_some_of_the_tensors_can_be_updated,  # noqa: F401
    test_the_context_ends_a_completion,  # noqa: F401
    test_tokens_do_not_depend_on_the_batch,  # noqa: F401
    test_top_logprobs_are_the_likeliest_of_the_reference,  # noqa: F401
)
from tests.engines.sglang_stand_in import standing_in
from tests.tiny import random_params, tiny_config

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    config, directory = tiny_config("llama", num_layers=1), tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params := random_params(config), config)
    with standing_in(directory, tmp_path_factory.mktemp("server")) as server:
        runner = asyncio.Runner()
        options = RemoteConfig(url=server.url, dialect="sglang", max_num_seqs=8)
        engine = runner.run(RemoteEngine.start(directory, options=options))
        bounded = ("presence_penalty", "frequency_penalty")
        yield Subject(engine, config, params, tolerance=1e-4, bounded=bounded, runner=runner)
        runner.run(engine.close())
        runner.close()


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.4}])
def test_truncation_keeps_the_likeliest_and_renormalizes(subject: Subject, truncation: dict[str, Any]) -> None:
    """The suite's also has both at once, which SGLang takes to mean something else: see docs/sglang.md."""
    assert_truncated(subject, truncation)


def test_penalties_are_subtracted(subject: Subject) -> None:
    """The suite's also has one that divides, which SGLang applies to the completion only."""
    completion = subject.complete(
        subject.prompts[5], temperature=0, max_tokens=16, presence_penalty=0.7, frequency_penalty=1.1
    )
    tokens, drawn = list(completion.prompt_token_ids), list[int]()
    for token in completion.token_ids:
        logits = subject.logits(tokens)[-1].copy()
        for seen in set(drawn):
            logits[seen] -= 0.7 + 1.1 * drawn.count(seen)
        assert token == int(logits.argmax())
        tokens.append(token)
        drawn.append(token)
