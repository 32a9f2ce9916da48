"""`PrefixAffinity` with real engines: the number of prompt tokens served from their caches."""

import asyncio
import contextlib
from collections import defaultdict

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.types import Request, SamplingParams
from tests.gateway.scripted import attached
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop
from tests.tiny import random_params, tiny_config

SYSTEM = tuple(range(10, 26))
CONVERSATIONS = {str(i): (*SYSTEM, *[30 + i] * 16) for i in range(12)}


@contextlib.asynccontextmanager
async def engines(address):
    config, options = tiny_config(), EmbeddedConfig(max_num_seqs=8, kv_cache_tokens=2048, block_size=8)
    params = random_params(config)
    async with contextlib.AsyncExitStack() as stack:
        found = [EmbeddedEngine(config, params, name=name, options=options) for name in "ab"]
        for engine in found:
            stack.push_async_callback(engine.close)
            await stack.enter_async_context(attached(engine, address, TOKEN))
        yield found


def turn(prompts, samples=1):
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=1)
    return [Request(f"{id}.{k}", prompt, sampling) for id, prompt in prompts.items() for k in range(samples)]


@on_the_loop
async def test_groups_and_conversations_find_what_was_computed(address, fleet):
    async with engines(address) as found:
        held, homes = dict(CONVERSATIONS), defaultdict(set)
        counts = []
        for number in range(3):
            # In another order each time, so that the least busy engine is another one.
            asked = {id: held[id] for id in sorted(held, key=lambda id: (int(id) * 5 + number) % 13)}
            for row in await collect(fleet.generate(turn(asked, samples=3))):
                id = row.request_id.split(".")[0]
                homes[id].add(row.engine)
                held[id] = (*row.prompt_token_ids, *row.token_ids, 90, 91)
            counts.append([sum(e.stats()[name] for e in found) for name in ("looked_up_tokens", "hit_tokens")])
        assert all(len(names) == 1 for names in homes.values()), homes
        assert len({name for (name,) in homes.values()}) == 2, "and both engines work"
        (before, hits_before), (looked_up, hits) = counts[0], counts[-1]
        # From the second turn on, all of a conversation but what has just been said is there: two tokens of every prompt and, at
        # most, the rest of a page; the samples of a group share even that.
        assert (hits - hits_before) / (looked_up - before) > 0.7
        for _ in range(200):  # the gateway's own requests count too
            status = await fleet.status()
            reported = sorted((e.looked_up_tokens, e.hit_tokens) for e in status.engines)
            if reported == sorted((e.stats()["looked_up_tokens"], e.stats()["hit_tokens"]) for e in found):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the fleet's status does not show what the engines counted: {status}")
