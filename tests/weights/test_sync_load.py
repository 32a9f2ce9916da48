"""What the benchmark of syncs under load makes of what it saw."""

import numpy as np
import pytest


@pytest.fixture
def evaluate(benchmark_module):
    return benchmark_module("weight_sync_load").evaluate


def test_tokens_belong_to_the_block_in_which_their_request_ended(evaluate):
    def sync(seconds, lost):
        return {"seconds": seconds, "pause": 0.001, "wait": 0.0, "lost_tokens": lost, "tokens_per_second": 50.0}

    blocks = [
        {"start": 10.0, "end": 12.0, "syncs": []},
        {"start": 12.0, "end": 16.0, "syncs": [sync(0.01, 1.0), sync(0.02, 2.0), sync(0.03, 6.0)]},
        {"start": 16.0, "end": 18.0, "syncs": []},
    ]
    ends = np.array([9.0, 10.0, 11.0, 12.0, 13.0, 15.9, 16.0, 17.0, 18.0])
    found = evaluate(blocks, ends, np.full(9, 60.0), running=12)
    assert found["tokens_per_second"] == {"without": 60.0, "with": 45.0} and found["throughput_ratio"] == 0.75
    assert found["step_seconds"] == 0.2, "12 requests draw 60 tokens per second"
    assert found["num_syncs"] == 3 and found["syncs_per_second"] == 0.75
    assert found["sync_seconds"]["p50"] == 0.02 and 0.029 < found["sync_seconds"]["p99"] <= 0.03
    assert found["lost_tokens_per_sync"] == 3.0
