"""Environments of the package `verifiers` (0.4), turned inside out.

A verifiers environment runs an agent that calls a model over OpenAI's API. Here the model is a server in the worker process,
which passes each request on as an observation and answers it with the policy's next turn. Whatever the environment is made of
(tasks, tools, harness, several agents in turn), it is unchanged, and the tokens stay the trainer's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError
from slipstream.model.tool_calls import ParseCalls, assistant_message
from slipstream.rl.agents.environments import Environment, Observation, Step

AGENT = {"harness": {"id": "slipstream_chat"}, "runtime": {"type": "subprocess"}}
"""The agent by default: a chat loop in the worker process, with the task's tools. Verifiers' own harnesses start a process for
each episode."""
MODEL = "policy"


def verifiers_factory(taskset: str, options: Mapping[str, Any], parse: ParseCalls, max_turns: int) -> VerifiersFactory:
    """The environments of a taskset. `options` are the settings of verifiers' `[env]` section. An agent that has used
    `max_turns` is stopped by verifiers, and scored."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise ConfigError(
            f"environment 'verifiers:{taskset}' needs the package verifiers in {sys.executable} ({error}); install it with: "
            "pip install 'verifiers>=0.4', or name the interpreter of another environment in environment.python"
        ) from None
    from slipstream.rl.agents import verifiers_harness

    sys.modules.setdefault(verifiers_harness.NAME, verifiers_harness)
    settings = {
        "agent": {**AGENT, "max_turns": max_turns},
        **options,
        "taskset": {**options.get("taskset", {}), "id": taskset},
    }
    try:
        environment = load_environment(resolve_env_config(settings))
    except Exception as error:  # of the user's package, of pydantic, or of verifiers
        raise ConfigError(
            f"environment 'verifiers:{taskset}' cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    if not environment.taskset.bounded:
        raise ConfigError(f"environment 'verifiers:{taskset}' has endless tasks; bound them")
    return VerifiersFactory(vf, environment, parse)


class VerifiersFactory:
    """One environment of verifiers, whose episodes share its tools and the server of the model."""

    def __init__(self, vf: Any, environment: Any, parse: ParseCalls) -> None:
        self.vf, self.environment, self.parse = vf, environment, parse
        self.tasks = list(environment.taskset)
        self.episodes: dict[str, VerifiersEnvironment] = {}
        """By the id of a trace, which verifiers sends with each request."""
        self.context: Any = None
        if not self.tasks:
            raise ConfigError("the taskset has no tasks")

    def __call__(self) -> Environment:
        return VerifiersEnvironment(self)

    async def prepare(self) -> None:
        """Start the server and the shared tools. They run until the process ends."""
        from aiohttp import web

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = self.vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="SLIPSTREAM_NO_KEY")
        self.context = self.vf.ModelContext(MODEL, client)
        self._serving = self.environment.serving()
        await self._serving.__aenter__()

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        episode = self.episodes.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=410)
        body = await request.json()
        message = await episode.answer(body["messages"], body.get("tools") or ())
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        completion = {"id": "slipstream", "object": "chat.completion", "created": 0, "model": MODEL}
        return web.json_response({**completion, "choices": [choice], "usage": usage})


class VerifiersEnvironment:
    """An episode: a task of the taskset, chosen by the seed."""

    def __init__(self, factory: VerifiersFactory) -> None:
        self._factory = factory
        self._requests = asyncio.Queue[tuple[list[dict[str, Any]], Sequence[Any]]]()
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._seen: list[dict[str, Any]] = []
        """The conversation so far, as the agent has sent it."""
        self._run: asyncio.Task[Any] | None = None

    async def reset(self, seed: int) -> Observation:
        factory = self._factory
        task = factory.tasks[seed % len(factory.tasks)]
        run = factory.environment.run_episode(task, factory.context, on_trace=self._minted)
        self._run = asyncio.create_task(run)
        observation, _, done = await self._advance()
        if done:
            raise RuntimeError("the episode ended before the agent asked the model")
        return observation

    async def step(self, action: str) -> Step:
        assert self._reply is not None
        text, calls = self._factory.parse(action)
        message = assistant_message(text, [call.row(f"call_{index}") for index, call in enumerate(calls)])
        self._seen.append(message)
        self._reply.set_result(message)
        return await self._advance()

    async def close(self) -> None:
        for trace, episode in list(self._factory.episodes.items()):
            if episode is self:
                del self._factory.episodes[trace]
        if self._run is not None:
            self._run.cancel()

    async def answer(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> dict[str, Any]:
        """Called by the server: pass a request on, and wait for the policy's turn."""
        await self._requests.put((messages, tools))
        self._reply = asyncio.get_running_loop().create_future()
        return await self._reply

    def _minted(self, trace: Any) -> None:
        self._factory.episodes[trace.id] = self

    async def _advance(self) -> Step:
        """Wait until the agent asks the model again, or the episode ends."""
        assert self._run is not None
        request = asyncio.create_task(self._requests.get())
        await asyncio.wait([request, self._run], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return self._observed(*request.result()), 0.0, False
        request.cancel()
        episode = self._run.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"the episode failed: {errors[-1] if errors else 'no error is recorded'}")
        return Observation(""), float(sum(trace.reward for trace in episode.traces)), True

    def _observed(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> Observation:
        """The messages that are new since the request before."""
        count = len(self._seen)
        if [message.get("role") for message in messages[:count]] != [
            message.get("role") for message in self._seen
        ] or any(_content(now) != _content(then) for now, then in zip(messages, self._seen)):
            raise RuntimeError(
                "the agent changed earlier messages of the conversation; an episode is one sequence of tokens, which can only "
                "grow"
            )
        new = tuple(messages[count:])
        self._seen = list(messages)
        return Observation("", new, tuple(tools) if not count else ())


def _content(message: Mapping[str, Any]) -> str:
    return json.dumps(message.get("content") or "")
