"""The worker process of environments. `worker_environments.py` starts it and documents the protocol.

Each episode has an environment object of its own. Calls of different episodes run concurrently: synchronous methods in
threads, asynchronous ones on one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.rl.agents.environments import Environment, checked_observation, checked_step
from slipstream.rl.agents.named import NEVER, EnvironmentFactory, environment_named, prepare
from slipstream.rl.rewards.callbacks import Callbacks, Raised, Returned
from slipstream.rl.rewards.worker import die_with, open_pipes, reply


def main(settings: dict[str, Any]) -> None:
    requests, replies = open_pipes()
    die_with(settings["owner"])
    lock, loop, callbacks = threading.Lock(), asyncio.new_event_loop(), Callbacks()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    try:
        factory = environment_named(*(settings[name] for name in ("name", "options", "tools", "max_turns")))
        asyncio.run_coroutine_threadsafe(prepare(factory, settings["name"], callbacks), loop).result()
    except ConfigError as error:
        reply(replies, {"refused": str(error)})
        os._exit(1)
    reply(replies, {"ready": True})
    episodes = _EpisodeServer(factory, callbacks)

    async def serve(message: dict[str, Any]) -> None:
        answer = await episodes.call(message["episode"], message["method"], message["argument"])
        with lock:
            reply(replies, {"call": message["call"], **answer})

    for line in requests:
        asyncio.run_coroutine_threadsafe(serve(json.loads(line)), loop)
    os._exit(0)  # do not wait for threads of the environments


class _EpisodeServer:
    def __init__(self, factory: EnvironmentFactory, callbacks: Callbacks) -> None:
        self._factory, self._callbacks = factory, callbacks
        self._environments: dict[int, Environment] = {}

    async def call(self, episode: int, method: str, argument: Any) -> dict[str, Any]:
        if method == "ping":
            return {"returned": None}
        if method == "end":
            environment = self._environments.pop(episode, None)
            close = getattr(environment, "close", None)
            if callable(close):
                await self._callbacks.call(close, timeout=NEVER)
            return {"returned": None}
        if episode not in self._environments:
            made = await self._callbacks.call(self._factory, timeout=NEVER)
            if isinstance(made, Raised):
                return dataclasses.asdict(made)
            assert isinstance(made, Returned)
            self._environments[episode] = made.value
        function = getattr(self._environments[episode], method, None)
        if not callable(function):
            return {"what": f"no method {method}; an environment has reset(seed) and step(action)", "trace": ""}
        outcome = await self._callbacks.call(function, (argument,), timeout=NEVER)
        if isinstance(outcome, Raised):
            return dataclasses.asdict(outcome)
        assert isinstance(outcome, Returned)
        try:
            if method == "reset":
                return {"returned": dataclasses.asdict(checked_observation(outcome.value, method))}
            observation, reward, done = checked_step(outcome.value, method)
            return {"returned": [dataclasses.asdict(observation), reward, done]}
        except SlipstreamError as error:
            return {"invalid": str(error)}
