"""One side of the `nccl` transport as a process, for test_nccl_gpu.py: `python -m tests.gpu.nccl_peer sender|receiver`.

Reads commands as lines of JSON, and answers each with a line of JSON: `{"error": …}` for a `TransferError`. A command
with `"die_at": n` kills the process (SIGKILL) just before its n-th group of messages; the first group is the header."""

from __future__ import annotations

import json
import os
import signal
import sys

from slipstream.errors import TransferError
from slipstream.model.config import ModelConfig
from slipstream.weights.transports.nccl.communicator import NcclPair
from slipstream.weights.transports.nccl.transport import NcclReceiver, NcclSender
from tests.weights.nccl_by_hand import Model, staged

CONFIG = ModelConfig(
    "llama",
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
BUCKET = 1 << 20


def model(facts):
    return Model(1, 1, facts["dtype"], facts["source"], CONFIG, 4 << 20)


class Receiver:
    def open(self, facts):
        self.model = model(facts)
        self.half = NcclReceiver(
            self.model.plan, 0, [0], 0, self.model.parameters, facts["deadline"], facts.get("primitive", "send")
        )
        self.half.start()
        return {"link": self.half.links[0].decode()}

    def expect(self, facts):
        self.half.expect(facts["version"])
        return {}

    def wait(self, facts):
        """Waits, and compares the bits with numpy's."""
        indices = set(self.model.plan.stream(0, 0))
        num_bytes = self.half.wait(facts["version"], indices)
        found, expected = staged(self.half, self.model, 0), self.model.expected(self.model.weights(facts["seed"]), 0)
        wrong = [name for name, array in expected.items() if found[name].tobytes() != array.tobytes()]
        return {"num_bytes": num_bytes, "planned": self.model.plan.num_bytes, "wrong": wrong}

    def renew(self, facts):
        self.half.abandon()
        self.half.start()
        return {"link": self.half.links[0].decode()}

    def close(self, facts):
        self.half.close()
        return {}


class Sender:
    def warm(self, facts):
        """JAX takes its time to start: better before a deadline runs."""
        import jax.numpy as jnp

        jnp.zeros(8).block_until_ready()
        return {}

    def open(self, facts):
        self.model = model(facts)
        self.half = NcclSender(
            facts["link"].encode(),
            self.model.plan,
            self.model.plan.stream(0, 0),
            "the receiver",
            BUCKET,
            facts["deadline"],
        )
        return {}

    def send(self, facts):
        self.half.send(facts["version"], self.model.pieces(self.model.weights(facts["seed"]), 0, 0))
        return {}

    def close(self, facts):
        self.half.close()
        return {}


def die_at(count):
    seen = []
    real = NcclPair.group

    def group(self, what):
        seen.append(what)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, what)

    NcclPair.group = group


def main():
    half = {"sender": Sender, "receiver": Receiver}[sys.argv[1]]()
    for line in sys.stdin:
        facts = json.loads(line)
        if "die_at" in facts:
            die_at(facts["die_at"])
        try:
            answer = getattr(half, facts["call"])(facts)
        except TransferError as error:
            answer = {"error": str(error)}
        print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
