"""Environments of an OpenEnv server (package `openenv`, 0.10), over its WebSocket. Each episode has a session of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.rl.agents.environments import Observation, Step


def require_openenv(url: str) -> None:
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError(f"environment 'openenv:{url}' does not name a server; write openenv:http://host:port")
    try:
        import openenv.core.generic_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"environment 'openenv:{url}' needs the package openenv in {sys.executable} ({error}); install it with: pip "
            "install 'openenv>=0.10', or name the interpreter of another environment in environment.python"
        ) from None


class OpenEnvEnvironment:
    """The policy's text is one field of the action, and the observation's text is one field of what the server returns.

    `options`: `action` and `observation` name these fields. Without `observation`, text is taken from the first of the usual
    names, or all of it as JSON. The others are arguments of the server's `reset`, besides `seed`."""

    FIELDS = ("text", "message", "content", "prompt", "output", "result")

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._options = dict(options)
        self._action, self._field = self._options.pop("action", "message"), self._options.pop("observation", "")
        self._client = GenericEnvClient(base_url=url)

    async def reset(self, seed: int) -> Observation:
        return self._observed((await self._client.reset(seed=seed, **self._options)).observation)

    async def step(self, action: str) -> Step:
        result = await self._client.step({self._action: action})
        return self._observed(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        await self._client.close()

    def _observed(self, observation: Mapping[str, Any]) -> Observation:
        fields = (
            [self._field] if self._field else [name for name in self.FIELDS if isinstance(observation.get(name), str)]
        )
        if not fields:
            return Observation(json.dumps(observation, sort_keys=True))
        if fields[0] not in observation:
            raise KeyError(f"the observation has no field {fields[0]!r}, but {', '.join(observation)}")
        return Observation(str(observation[fields[0]]))
