"""A trainer on its own machine, run by tests: `python host_trainer.py MODEL ENGINES OUT [TARGET]`.

Connects to the fleet (at TARGET, or by environment variables), waits for the engines, syncs weights twice, and writes the completions.
With a TARGET, it then opens tampered links and writes the errors. With KILL_AN_ENGINE set, it kills an engine and waits until it is
back."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.transformer import decoder
from slipstream.types import SamplingParams
from slipstream.weights.update import transfer

PROMPTS = ["123=", (20, 21, 22), "7="]
SAMPLING = SamplingParams(max_tokens=5, n=2, seed=3)
SEEDS = (1, 2)
TAMPERED = {
    "secret": {"secret": "00" * 32},
    "certificate": {"certificate": "ab" * 32},
    "plaintext": {"certificate": ""},
}


def weights(model, seed):
    """Return scaled weights, so that completions differ."""
    config = read_config(model)
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, decoder.init(config, jax.random.key(seed)))


def answers(bridge, **where):
    return [list(c.token_ids) for c in bridge.generate(PROMPTS, SAMPLING, **where)]


def main(model, num_engines, out, target=None):
    facts = {"tokens": [], "transports": [], "refused": {}}
    with slipstream.connect(target) as bridge:
        names = joined(bridge, num_engines)
        for seed in SEEDS:
            report = bridge.sync(weights(model, seed))
            facts["transports"] += [engine.transport for engine in report.engines]
            facts["tokens"].append({name: answers(bridge, engine=name) for name in names})
        facts["num_bytes"] = report.num_bytes
        if os.environ.get("KILL_AN_ENGINE"):
            killed = kill_first(bridge)
            bridge.sync(weights(model, SEEDS[-1]))
            facts["killed"] = {killed: answers(bridge, engine=killed)}
        facts["version"] = bridge.version
    for what, change in TAMPERED.items() if target else ():
        with tampered(change), slipstream.connect(target) as bridge:
            facts["refused"][what] = failure(lambda bridge=bridge: bridge.sync(weights(model, 3)))
    with slipstream.connect(target) as bridge:
        facts["after"] = [bridge.version, answers(bridge)]
    Path(out).write_text(json.dumps(facts))


def joined(bridge, count):
    eventually(lambda: len(bridge.status().engines) >= count)
    return sorted(engine.info.name for engine in bridge.status().engines)


def kill_first(bridge):
    """Kill a process and wait for its replacement. All test machines share process ids."""
    info = bridge.status().engines[0].info
    os.kill(info.pid, signal.SIGKILL)
    eventually(
        lambda: any(
            engine.info.name == info.name and engine.info.pid != info.pid and engine.state != "lost"
            for engine in bridge.status().engines
        )
    )
    return info.name


def eventually(done, seconds=100):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def tampered(change):
    """Tamper with links over the network."""
    honest = transfer.open_sender

    def opened(link, *rest):
        facts = json.loads(link)
        return honest(json.dumps(facts | change).encode() if facts["transport"] == "tcp" else link, *rest)

    transfer.open_sender = opened
    try:
        yield
    finally:
        transfer.open_sender = honest


def failure(call):
    try:
        call()
    except SlipstreamError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", "it went through"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
