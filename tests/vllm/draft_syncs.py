"""Syncs that update a draft model with the policy, whose proposals are accepted accordingly. Runs with vLLM in one process
(`architectures.py`) and, on a GPU, against a launched engine (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slipstream.bridge.bridge import Bridge
from slipstream.errors import MappingError, NotReady, SlipstreamError, Unsupported
from slipstream.types import SamplingParams, VersionSpan
from tests.tiny import hf_greedy
from tests.vllm.random_models import PROMPT, new_weights

COUNT, PROPOSED = 24, 3
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


def speculation(draft: Path) -> dict[str, Any]:
    """Arguments of vLLM."""
    settings = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": PROPOSED}
    return {"speculative_config": settings}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except SlipstreamError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check_syncs(start: Callable[[Path, Path], AbstractContextManager[Bridge]], folder: Path, config: Any) -> None:
    """`start` is given the directories of policy and draft. The policy has no weights at first: transformers knows its tensors.
    The draft has those of seed 1. Trees are flat dicts of HF names."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(folder / "policy")
    trees, expected = {}, {}
    for seed in (1, 2, -2, 3):  # -2: as 2, with another norm
        new_weights(model, abs(seed))
        if seed < 0:
            model.model.norm.weight.data *= -1
        trees[seed] = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
        expected[seed] = hf_greedy(model, PROMPT, COUNT)
        if seed == 1:
            model.save_pretrained(folder / "draft")
    assert len(set(expected.values())) == 4

    def steps(seed: int) -> int:
        """Generate the tokens of the model with these weights. Return the steps it took: each draws one token and what it
        accepts."""
        events = list(bridge.stream_tokens([PROMPT], GREEDY))
        assert tuple(t for event in events for t in event.token_ids) == expected[seed], seed
        return len(events)

    all_accepted, few_accepted = COUNT // (PROPOSED + 1) + 2, COUNT // 2
    with start(folder / "policy", folder / "draft") as bridge:
        assert error_of(lambda: bridge.generate([PROMPT])).startswith(NotReady.__name__)
        report, size = bridge.sync(trees[1]), sum(leaf.nbytes for leaf in trees[1].values())
        assert report.num_bytes == size and report.engines[0].checksummed
        assert steps(1) <= all_accepted
        bridge.sync(trees[2])
        assert steps(2) >= few_accepted
        assert bridge.sync(trees[2], draft=trees[2]).num_bytes == size  # the policy has not changed
        assert steps(2) <= all_accepted
        norm, head = trees[-2]["model.norm.weight"], -trees[2]["lm_head.weight"]
        report = bridge.sync({"model.norm.weight": norm}, draft={"lm_head.weight": head}, partial=True)
        assert report.num_bytes == norm.nbytes + head.nbytes
        assert steps(-2) >= few_accepted
        bridge.sync(trees[3], draft=trees[3])
        assert steps(3) <= all_accepted
        (completion,) = bridge.generate([PROMPT], GREEDY)
        assert completion.spans == (VersionSpan(bridge.version, 0, COUNT),)
        cut = {"model.norm.weight": norm[:-1]}
        error = error_of(lambda: bridge.sync(trees[3], draft=cut, partial=True))
        assert error.startswith(MappingError.__name__) and "draft.model.norm.weight" in error
        error = error_of(lambda: bridge.sleep(level=2))
        assert error.startswith(Unsupported.__name__) and "level 2: it would lose its draft model" in error
        assert steps(3) <= all_accepted
        (status,) = bridge.status().engines
        assert status.info.vocab_size == 96 and status.info.model.startswith(f"{config.model_type}-")
