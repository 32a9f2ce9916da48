"""`slipstream.train`: a whole run in one call."""

from pathlib import Path

import slipstream
from slipstream.rl.reporting.records import Evaluation, StepRecord, WarmupRecord
from tests.rl.runs import ENGINE


def test_a_whole_run_in_one_call_and_its_continuation(tmp_path):
    config = slipstream.TrainConfig(
        run_dir=tmp_path / "run",
        steps=1,
        warmup_steps=2,
        engines=0,
        eval_prompts=4,
        task={"digits": 2},
        algorithm={"prompts": 4, "group": 4, "max_tokens": 4},
        engine=ENGINE,
    )
    records = []
    result = slipstream.train(config, on_record=records.append)
    assert [type(r) for r in records[:4]] == [WarmupRecord, WarmupRecord, Evaluation, StepRecord]
    assert result.run_dir == tmp_path / "run" and [s.step for s in result.steps] == [1]
    assert result.evaluations[-1] in records and result.seconds > 0
    assert (Path(result.checkpoint) / "model.safetensors").exists()

    more = slipstream.train(config.replace(steps=2))
    assert [s.step for s in more.steps] == [1, 2] and more.steps[0] == result.steps[0]
