"""Plays the episodes of a training run: what generates the samples of a rollout queue, with engines and environments.

A prompt is the seed of `reset`, and a sample is a whole episode, as a `Completion` with `episode` set. So the queue does for
episodes what it does for completions: the staleness bound, the journal, each group once. Episodes continue over weight syncs,
and their spans tell which version sampled which token."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence

from slipstream.bridge.bridge import Bridge
from slipstream.errors import EnvironmentTimeout, EpisodeError, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.rl.agents.dialogue import ChatDialogue, Dialogue, MarkedText
from slipstream.rl.agents.environments import NO_MARKERS
from slipstream.rl.agents.episodes import Episode
from slipstream.rl.agents.hosts import EnvironmentHosts, Interrupted
from slipstream.rl.agents.multi_turn import EpisodeLoop, derive_seed
from slipstream.rl.config import EnvironmentConfig
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.callbacks import gather_or_cancel
from slipstream.runtime import event_loop
from slipstream.types import Completion, EpisodeOutcome, Failure, Request, SamplingParams

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_player(
    config: EnvironmentConfig, bridge: Bridge, codec: Codec, adapter: str = ""
) -> Iterator[EpisodePlayer | None]:
    """None without an environment. `adapter` plays in evaluations; in training, the requests of the queue name it."""
    if not config.name:
        yield None
        return
    hosts = event_loop.run(_hosts(config))
    try:
        yield EpisodePlayer(config, bridge, codec, hosts, adapter)
    finally:
        event_loop.run(hosts.close())


async def _hosts(config: EnvironmentConfig) -> EnvironmentHosts:
    hosts = EnvironmentHosts(config)
    await hosts.start()
    return hosts


class EpisodePlayer:
    def __init__(
        self, config: EnvironmentConfig, bridge: Bridge, codec: Codec, hosts: EnvironmentHosts, adapter: str = ""
    ) -> None:
        self._config, self._bridge, self._codec, self._hosts, self._adapter = config, bridge, codec, hosts, adapter

    def sample(self, prompts: Sequence[str], sampling_params: Sequence[SamplingParams]) -> list[Completion]:
        """Play the episodes of prompts outside of the queue, for an evaluation."""
        requests = [
            Request(str(i), prompt, params, adapter=self._adapter)
            for i, (prompt, params) in enumerate(zip(prompts, sampling_params))
        ]
        work = (self._play(request, index) for request in requests for index in range(request.sampling.n))
        played = event_loop.run(gather_or_cancel(work))
        return [dataclasses.replace(completion, prompt_index=int(completion.request_id)) for completion in played]

    async def generate(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """Play the episodes of a request of the rollout queue. Each is yielded when it has ended."""
        (request,) = convert.requests_from_pb(message)
        episodes = [asyncio.create_task(self._play(request, index)) for index in range(request.sampling.n)]
        try:
            for episode in asyncio.as_completed(episodes):
                try:
                    result: Completion | Failure = await episode
                except SlipstreamError as error:  # of an engine: the queue decides what to do
                    result = Failure(request.id, error)
                yield convert.results_to_pb([result])
        finally:
            for task in episodes:
                task.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _play(self, request: Request, index: int) -> Completion:
        """Play one episode. If the environment fails, the completion says so; failures of engines are raised."""
        try:
            try:
                return await self._attempt(request, index)
            except Interrupted as error:
                log.info("seed %s: the process of several environments %s; playing alone", request.prompt, error)
                return await self._attempt(request, index, alone=True)
        except EpisodeError as error:
            log.warning("an episode is left out: %s", error)
            outcome = EpisodeOutcome((), "failed", str(error))
            # A batch needs a token; nothing is learned from it.
            return Completion(request.id, index, (0,), (), "", (), (), "stop", (), episode=outcome)

    async def _attempt(self, request: Request, index: int, alone: bool = False) -> Completion:
        config, seed = self._config, int(str(request.prompt))
        name = f"environment {config.name!r}, seed {seed}, episode {index}"
        sampling = dataclasses.replace(request.sampling, n=1, seed=derive_seed(request.sampling.seed or 0, index))
        async with self._hosts.host(alone) as host:
            loop = EpisodeLoop(
                *(self._bridge, self._codec, host, self._dialogue(), sampling, name, seed),
                max_turns=config.max_turns,
                max_length=config.max_tokens,
                step_timeout=config.step_timeout,
                turn_timeout=config.episode_timeout,
                adapter=request.adapter,
            )
            try:
                async with asyncio.timeout(config.episode_timeout):
                    tokens, turns, end = await loop.run()
            except SlipstreamError:  # DeadlineExceeded and EnvironmentTimeout are TimeoutErrors, too
                raise
            except TimeoutError:
                raise EnvironmentTimeout(
                    f"{name} took longer than {config.episode_timeout:g} s; increase environment.episode_timeout"
                ) from None
        return episode_completion(request.id, index, Episode(index, 0, seed, tokens, turns, end))

    def _dialogue(self) -> Dialogue:
        if self._codec.chat is not None:
            return ChatDialogue(self._codec, self._codec.chat)
        return MarkedText(self._codec, NO_MARKERS)


def episode_completion(request_id: str, index: int, episode: Episode) -> Completion:
    """An episode as a completion of its first observation."""
    start = episode.turns[0].start
    spans = tuple(dataclasses.replace(span, start=span.start - start, stop=span.stop - start) for span in episode.spans)
    return Completion(
        request_id=request_id,
        sample_index=index,
        prompt_token_ids=episode.token_ids[:start],
        token_ids=episode.token_ids[start:],
        text="",
        logprobs=episode.logprobs[start:],
        raw_logprobs=episode.raw_logprobs[start:],
        finish_reason="stop" if episode.end == "done" else "length",
        spans=spans,
        engine=episode.turns[-1].engine,
        episode=EpisodeOutcome(episode.rewards, episode.end),
        routes=episode.routes,
    )
