"""TRL's clients of a vLLM server, used with a fleet."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import SamplingParams


@pytest.fixture(scope="module")
def found(served):
    script = Path(__file__).with_name("trl_client.py")
    done = subprocess.run(
        [sys.executable, str(script), served.url, served.token], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_generations_match_the_bridge(found, served):
    wanted = served.bridge.generate(["hello", "abc"], SamplingParams(n=2, max_tokens=6, seed=3))
    texts = found["texts"]
    assert texts["prompt_ids"] == [list(c.prompt_token_ids) for c in wanted[::2]]
    assert texts["completion_ids"] == [list(c.token_ids) for c in wanted]
    for row, completion in zip(texts["logprobs"], wanted):
        assert [logprob for (logprob,) in row] == pytest.approx(completion.logprobs)


def test_top_logprobs_and_scores(found, served):
    assert all(2 <= len(row) <= 3 for row in found["ids"]["logprobs"][0])
    (score,) = served.bridge.score([[5, 6, 7, 8, 9]], top_k=3)
    sequence = found["sequence"]
    assert [value for (value,) in sequence["actual_logprobs"][0]] == pytest.approx(score.logprobs[1:])
    assert sequence["logprob_token_ids"][0] == [list(t.token_ids) for t in score.top_logprobs[1:]]
    assert found["chat"]["prompt_ids"] == [[24, 40, 11, 12, 40, 4, 40]]


def test_control_calls_and_the_missing_communicator(found, served):
    assert (found["model"], found["world_size"], found["max_model_len"]) == ("tiny", 1, 128)
    assert found["dtype"] == "torch.float32"
    assert found["transfer"] is None and "has no weight-transfer engine" in found["no communicator"]
    assert served.get("/is_paused") == {"is_paused": False}


def test_weight_calls_are_refused_with_the_reason(found):
    """Calls as TRL sends them with a communicator: no update starts, and nothing changes."""
    for call in ("no tensor", "nothing sent"):
        assert found[call].startswith("Request failed: 400") and "no weight transfer is initialized" in found[call]
    assert found["version"] == found["version before"]
