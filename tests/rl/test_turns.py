"""Trainer and engines that take turns on the same devices."""

from __future__ import annotations

from pathlib import Path

import slipstream
from slipstream.config import EngineConfig
from slipstream.rl.config import AlgorithmConfig, TrainConfig
from slipstream.rl.loop import train
from slipstream.rl.records import StepRecord
from slipstream.rl.tokens import write_small_model


def test_engines_sleep_while_the_trainer_trains_and_the_records_are_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_small_model(model)
    records: dict[bool, list[StepRecord]] = {}
    for turns in (False, True):
        config = TrainConfig(
            steps=3,
            warmup_steps=2,
            eval_every=3,
            take_turns=turns,
            algorithm=AlgorithmConfig(prompts=4, group=2),
            engine=EngineConfig(max_concurrency=8),
        )
        with slipstream.inprocess(model, engine=config.engine) as bridge:
            found = list(train(config, bridge, model, tmp_path / f"run-{turns}"))
        records[turns] = [r for r in found if isinstance(r, StepRecord)]
    for apart, taking in zip(records[False], records[True], strict=True):
        assert (apart.reward, apart.metrics, apart.version) == (taking.reward, taking.metrics, taking.version)
        assert not apart.memory and taking.memory.keys() == {"generating", "training", "syncing", "woken"}
        assert taking.memory["training"] < taking.memory["generating"]
        assert taking.seconds.sleep > 0 and taking.seconds.wake > 0 == apart.seconds.wake
