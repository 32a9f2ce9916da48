"""The bridge's calls, with an engine that counts instead of computing."""

import math
from dataclasses import replace

import pytest

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.errors import DeadlineExceeded, EngineFailure, Unsupported
from slipstream.types import Progress, SamplingParams
from tests.gateway.scripted import ScriptedEngine


@pytest.mark.parametrize("call", ["generate", "stream", "stream_tokens"])
def test_a_generation_that_makes_no_progress_ends(call):
    engine = ScriptedEngine()
    with Bridge(LocalFleet(engine)) as bridge:
        assert len(bridge.generate([[1], [2]], timeout=60)) == 2
        engine.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"no result within 0.1 s; 1 samples are missing"):
            list(getattr(bridge, call)([[1], [2]], timeout=0.1))
        assert engine.cancelled == 1


def test_closing_a_stream_of_tokens_early_cancels_its_requests():
    engine = ScriptedEngine()
    with Bridge(LocalFleet(engine)) as bridge:
        engine.gate.clear()
        events = bridge.stream_tokens([[1]])
        assert len(next(events).token_ids) == 1
        events.close()
        assert engine.cancelled == 1


def test_a_sample_that_begins_anew_says_so_in_its_stream():
    class RestartedEngine(ScriptedEngine):
        async def generate(self, requests):
            yield [Progress(requests[0].id, 0, 0, (96, 95), (-1.0, -1.0), version=0)]
            async for batch in super().generate(requests):
                yield batch

    with Bridge(LocalFleet(RestartedEngine())) as bridge:
        first, again, last = bridge.stream_tokens([[1]], SamplingParams(seed=5))
    assert [e.restarted for e in (first, again, last)] == [False, True, False]
    assert again.token_ids + last.token_ids == last.completion.token_ids == (5, 0)


def test_wrong_results_of_an_engine_in_this_process_are_failures():
    class NanEngine(ScriptedEngine):
        async def generate(self, requests):
            async for batch in super().generate(requests):
                yield [replace(row, logprobs=(math.nan, -1.0)) for row in batch]

    with Bridge(LocalFleet(NanEngine("mine"))) as bridge:
        with pytest.raises(EngineFailure, match="engine 'mine' returned 2 logprobs, 1 of them not finite"):
            bridge.generate([[1]])
        rollouts = bridge.rollouts(batch=1)
        rollouts.submit(["a"], [[1]])
        (group,) = rollouts.take()
        assert not group.completions and isinstance(group.error, EngineFailure)
        with pytest.raises(Unsupported, match="is the only one"):
            bridge.quarantine("mine", "it lies")
