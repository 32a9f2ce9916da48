"""Tunix's GRPO with rollouts by real vLLM."""

from tests.plugins import tunix_tiny
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm


def test_grpo_begins_where_tunix_alone_begins_and_its_weights_reach_vllm_every_step():
    example = tunix_tiny.example()
    run = example.main(["--engine", "vllm", "--python", PYTHON, "--steps", "12"])
    alone = example.main(["--rollout", "vanilla", "--steps", "0"])
    assert [t.tolist() for t in run.before] == [t.tolist() for t in alone.before]
    assert len(run.rewards) == run.version == 12
    assert sum(run.rewards[-3:]) > sum(run.rewards[:3]) + 0.45, run.rewards
