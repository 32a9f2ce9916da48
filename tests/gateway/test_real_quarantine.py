"""Probes with real engines: a sound one passes, one with other weights does not, though its outputs look sound."""

import contextlib
import math
from dataclasses import replace

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.gateway import quarantine
from slipstream.types import Completion, Request, SamplingParams
from tests.gateway.scripted import attached
from tests.gateway.test_engine_watch import kinds, reasons, until
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop, states
from tests.tiny import random_params, tiny_config


class LyingOnce(EmbeddedEngine):
    lies = False

    async def generate(self, requests):
        async with contextlib.aclosing(super().generate(requests)) as batches:
            async for batch in batches:
                if self.lies:
                    batch = [
                        replace(r, logprobs=(math.nan,) * len(r.logprobs)) if isinstance(r, Completion) else r
                        for r in batch
                    ]
                    self.lies = False
                yield batch


def test_only_a_sound_engine_is_let_back_in(monkeypatch):
    monkeypatch.setattr(quarantine, "FIRST_SECONDS", 0.05)
    config, options = tiny_config(), EmbeddedConfig(max_num_seqs=8, kv_cache_tokens=2048, block_size=8)

    @on_the_loop
    async def test(address, fleet):
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                LyingOnce(config, random_params(config, seed), name=name, options=options)
                for name, seed in (("sound", 0), ("lied once", 0), ("other weights", 1))
            ]
            for engine in engines:
                stack.push_async_callback(engine.close)
                await stack.enter_async_context(attached(engine, address, TOKEN))
            for engine in engines[1:]:
                engine.lies = True
            sampling = SamplingParams(max_tokens=12, n=2, ignore_eos=True, seed=3)
            requests = [Request(str(i), (i + 1, 5, 6), sampling) for i in range(9)]
            completions = await collect(fleet.generate(requests))
            assert len(completions) == 18 and {c.engine for c in completions} == {"sound"}

            async def is_decided():
                return {("release", "lied once"), ("probe", "other weights")} <= set(await kinds(fleet))

            await until(is_decided)
            assert (await states(fleet))["lied once"] == "ready"
            assert "nats per token" in (await reasons(fleet))["other weights"]

    test()
