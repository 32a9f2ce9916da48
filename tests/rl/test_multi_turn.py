"""Trainer and engines that take turns on the same devices (`take_turns`)."""

from __future__ import annotations

from pathlib import Path

import slipstream
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.reporting.records import StepRecord
from slipstream.rl.trainer.loop import training_loop
from tests.rl.runs import SHORT


def test_engines_sleep_while_the_trainer_trains_and_the_records_are_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_sample_config(model)
    records: dict[bool, list[StepRecord]] = {}
    engine = SHORT.engine.replace(kv_cache_tokens=4096)  # much memory, compared with that of other tests
    for turns in (False, True):
        config = SHORT.replace(steps=3, warmup_steps=2, take_turns=turns, engine=engine)
        with slipstream.inprocess(model, engine=config.engine) as bridge:
            found = list(training_loop(config, bridge, model, tmp_path / f"run-{turns}"))
        records[turns] = [r for r in found if isinstance(r, StepRecord)]
    for apart, taking in zip(records[False], records[True], strict=True):
        assert (apart.reward, apart.metrics, apart.version) == (taking.reward, taking.metrics, taking.version)
        assert not apart.memory and taking.memory.keys() == {"generating", "training", "syncing", "woken"}
        assert taking.memory["training"] < taking.memory["generating"]
        assert taking.seconds.sleep > 0 and taking.seconds.wake > 0 == apart.seconds.wake
