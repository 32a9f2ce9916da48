"""Environments by name: of the user, of `verifiers`, and OpenEnv servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, get_args

from slipstream.errors import ConfigError
from slipstream.model.tool_calls import ParseCalls, ToolCallParser, ToolFormat
from slipstream.rl.agents.environments import Environment
from slipstream.rl.rewards.callbacks import Callbacks, Raised
from slipstream.rl.rewards.functions import import_function

NEVER = 1e9
"""Seconds: the trainer keeps the deadlines."""

EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes the environment of one episode."""


async def prepare(factory: EnvironmentFactory, name: str, callbacks: Callbacks) -> None:
    """Start what all episodes of a process share, if the factory has something to start. Raises `ConfigError` if it fails."""
    start = getattr(factory, "prepare", None)
    if start is not None and isinstance(outcome := await callbacks.call(start, timeout=NEVER), Raised):
        raise ConfigError(f"environment {name!r} cannot be started: {outcome.what}\n{outcome.trace}")


def environment_named(
    name: str, options: Mapping[str, Any], tools: str = "hermes", max_turns: int = 0
) -> EnvironmentFactory:
    """`my_module:MyEnvironment`, `verifiers:<taskset>` or `openenv:<url>`. `tools` is the format of tool calls, and `max_turns`
    the limit that the run sets. Raises `ConfigError` if it cannot be imported."""
    kind, _, rest = name.partition(":")
    if kind == "verifiers":
        from slipstream.rl.agents.verifiers_environment import verifiers_factory

        return verifiers_factory(rest, options, parser_named(tools), max_turns)
    if kind == "openenv":
        from slipstream.rl.agents.openenv_environment import OpenEnvEnvironment, require_openenv

        require_openenv(rest)
        return partial(OpenEnvEnvironment, rest, options)
    factory = import_function(name, "environment")
    if not options:
        return factory
    try:
        return partial(factory, **options)
    except TypeError as error:
        raise ConfigError(f"environment {name!r} does not take environment.options {dict(options)}: {error}") from None


def parser_named(name: str) -> ParseCalls:
    """The parser of a turn's tool calls: `hermes`, `llama`, or the user's `my_module:parse`."""
    for known in get_args(ToolFormat):
        if name == known:
            return lambda text: ToolCallParser(known).finish(text)
    return import_function(name, "tool parser")
