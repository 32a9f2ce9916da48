"""Faults in the updates of a trainer with two processes: gateway, two engines, and two JAX processes in one sync.

SLIPSTREAM_CHAOS_FAULTS=1 python -m pytest -s tests/chaos/test_two_trainers.py       # every step of an update"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.chaos.checker import check
from slipstream.chaos.history import HistoryReader, read_history
from slipstream.config import EmbeddedConfig, GatewayConfig
from slipstream.deploy.processes.process_group import ProcessGroup
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.runtime.failpoints import STEPS, VARIABLE
from tests.deploy.test_trainer_group import CONFIG, Trainers

UPDATE = [
    step
    for step in STEPS.split()
    if step.startswith(("sync", "engine", "gateway"))
    and step.endswith(
        ("call", "send", "sent", "done", "begin", "stage", "verify", "staged", "commit", "committed", "recorded")
    )
]
FEW = [
    ("sync.sent", "kill"),
    ("sync.send", "freeze"),
    ("gateway.stage", "error"),
    ("engine.verify", "corrupt"),
    ("engine.commit", "freeze"),
    ("engine.staged", "kill"),
    ("gateway.committed", "kill"),
]
ALL = [(step, kind) for step in UPDATE for kind in ("kill", "freeze", "error")]
FAULTS = ALL if os.environ.get("SLIPSTREAM_CHAOS_FAULTS") else FEW
FREEZE_SECONDS = 1.0


@contextmanager
def thawing(directory: Path) -> Iterator[Counter[str]]:
    """Continue frozen processes after a second. Yields the steps where faults have happened."""
    ended, seen = threading.Event(), Counter[str]()

    def watch() -> None:
        reader = HistoryReader(directory)
        while not ended.wait(0.05):
            for event in reader.new():
                if event.is_fault:
                    seen[event.step] += 1
                    if event.facts["fault"] == "freeze":
                        time.sleep(FREEZE_SECONDS)
                        os.kill(event.pid, signal.SIGCONT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def sync(trainers: Trainers, seed: int) -> list[int | None]:
    """Let both processes sync; return the version that each reports, None if it failed or died."""
    for process in trainers.processes:
        try:
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
    return [json.loads(process.stdout.readline() or "{}").get("version") for process in trainers.processes]


@pytest.mark.timeout(1200)
def test_updates_of_two_processes_keep_every_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = tmp_path / "chaos"
    (chaos / "armed").mkdir(parents=True)
    (chaos / "history").mkdir()
    monkeypatch.setenv(VARIABLE, str(chaos))
    (tmp_path / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    with ProcessGroup(tmp_path / "run", 120) as group, thawing(chaos) as seen:
        group.keep_alive()
        group.start_gateway(GatewayConfig())
        for name in ("engine-0", "engine-1"):  # of one shape: the history has a digest of each engine's shards
            config = EmbeddedConfig(max_num_seqs=4, max_model_len=64, tensor_parallel_size=2)
            group.start_engine(name, tmp_path, config, 120.0)
        group.wait_for_engines(2)
        trainers, seed, last = Trainers(tmp_path / "run"), 0, -1
        try:
            for step, kind in [*FAULTS, ("", "")]:
                if step:
                    (chaos / "armed" / step).write_text(kind)
                before, until = seen[step], time.monotonic() + 120
                while True:  # until the fault has happened and both processes sync again
                    assert time.monotonic() < until, (step, kind)
                    versions = sync(trainers, seed := seed + 1)
                    if any(process.poll() is not None for process in trainers.processes):
                        trainers.close()  # JAX does not replace a process of a group
                        trainers = Trainers(tmp_path / "run")
                    elif versions[0] is not None and versions[0] == versions[1] and (not step or seen[step] > before):
                        break
                assert versions[0] is not None and versions[0] > last
                print(f"{step:20} {kind:8} version {last} → {versions[0]}", flush=True)
                last = versions[0]
        finally:
            trainers.close()
    assert check(read_history(chaos), 0) == []
