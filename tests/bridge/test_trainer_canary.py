"""What engines compute after a sync, compared with what the trainer does."""

import asyncio
import math

import jax
import jax.numpy as jnp
import pytest

import slipstream
from slipstream.bridge.trainer_canary import TrainerCanary
from slipstream.config import EmbeddedConfig
from slipstream.errors import RequestError, Unsupported
from slipstream.model.transformer import decoder
from slipstream.types import CommitReport, EngineInfo, EngineSync, Score, StageReport, SyncReport
from tests.engines.subjects import CONFIG, OPTIONS
from tests.tiny import random_params, write_config

PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))


def scorer(params):
    return lambda sequences: decoder.logprobs(params, CONFIG, jnp.asarray(sequences)).tolist()


def test_an_engine_computes_what_the_trainer_does(tmp_path, caplog):
    with slipstream.inprocess(write_config(tmp_path, CONFIG), engine=EmbeddedConfig(**OPTIONS)) as bridge:
        report = bridge.sync(PARAMS, canary=scorer(PARAMS))
        assert report.engines[0].canary_gap < 1e-3 and report.engines[0].checksummed
        assert bridge.sync(PARAMS).engines[0].canary_gap is None
        for wrong in (lambda sequences: [[0.0]], lambda sequences: [[math.nan] * (len(row) - 1) for row in sequences]):
            with pytest.raises(RequestError, match="canary must return finite logprobs"):
                bridge.sync(PARAMS, canary=wrong)
        assert bridge.version == 1, "an error of the trainer's function comes before the sync"
        other = PARAMS | {"lm_head": {"weight": PARAMS["lm_head"]["weight"][::-1]}}
        gap = bridge.sync(PARAMS, canary=scorer(other)).engines[0].canary_gap
        assert gap > 0.5 and "no engine agrees with the trainer" in caplog.text


class Fleet:
    """Three engines; each computes its own logprob for every token."""

    def __init__(self, **logprobs):
        self._logprobs, self.quarantined = logprobs, {}

    async def score(self, sequences, engine="", top_k=0, adapter=""):
        if self._logprobs[engine] is None:
            raise Unsupported("this engine cannot score")
        return [Score(s, (self._logprobs[engine],) * (len(s) - 1), 5, engine) for s in sequences]

    async def quarantine(self, engine, reason, since=None):
        self.quarantined[engine] = (reason, since)


def compared(fleet, names="abc", version=5):
    infos = [EngineInfo(n, "x", "m", "float32", 1, (), (), (), "h", 64, 8, version, vocab_size=100) for n in names]
    syncs = tuple(EngineSync(n, "shm", StageReport(0, 0.0), CommitReport(0.0, 0.0)) for n in names)
    report = SyncReport(version, 0, 0.0, 0.0, 0.0, 0.0, 0.0, syncs)
    canary = TrainerCanary(infos[0], lambda sequences: [[-1.0] * (len(row) - 1) for row in sequences])
    rows = asyncio.run(canary.compare(fleet, infos, report)).engines
    return [None if row.canary_gap is None else round(row.canary_gap, 3) for row in rows]


def test_who_disagrees_is_quarantined_unless_all_do():
    fleet = Fleet(a=-1.01, b=-1.5, c=math.nan)
    assert compared(fleet) == [0.01, 0.5, math.inf]
    assert fleet.quarantined.keys() == {"b", "c"} and fleet.quarantined["b"][1] == 5
    assert "differ from the trainer's by 0.5 nats" in fleet.quarantined["b"][0]
    fleet = Fleet(a=-2.0, b=-2.0, c=None)
    assert compared(fleet) == [1.0, 1.0, None] and not fleet.quarantined


def test_an_answer_of_another_version_says_nothing():
    fleet = Fleet(a=-2.0, b=-1.0, c=-1.0)
    assert compared(fleet, version=4) == [None] * 3 and not fleet.quarantined
