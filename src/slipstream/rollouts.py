"""The rollouts of a run, as a trainer sees them: prompts go in, groups of completions come out, each once.

    rollouts = bridge.rollouts(max_staleness=2, batch=32)
    rollouts.submit(ids, prompts, sampling)        engines begin as soon as the bound on staleness lets them
    groups = rollouts.take()                       32 groups, none older than two versions; train on them
    groups += rollouts.take(8, more=True)          if some of them taught nothing, say: before the sync, beyond the batch
    rollouts.expect(bridge.version + 1)            ask for the next, while that version is on its way
    bridge.sync(params)
    position = rollouts.position                   save it: after a crash, go on behind it
    rollouts.saved(position)                       and say so: what came before need not be kept

`submit` and `take` may be repeated, and `expect` may be left out. A gateway that is gone is waited for: what it had accepted
is in its journal."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import xxhash

from slipstream import portal
from slipstream.errors import DeadlineExceeded, GatewayLost, InvalidSampling, NotReady, RolloutError, SlipstreamError
from slipstream.gateway.staleness import Bound
from slipstream.types import Prompt, Request, RolloutGroup, SamplingParams, plain_ids

if TYPE_CHECKING:
    from slipstream.fleet import Fleet

T = TypeVar("T")

AGAIN_SECONDS = 0.2
EXPECT_SECONDS = 600.0
"""How long the gateway keeps a question for a version that does not come."""
SUBMIT_PROMPTS = 256
"""Prompts in one message."""


class Rollouts:
    """Made by `Bridge.rollouts`. Used by one thread."""

    def __init__(self, fleet: Fleet, bound: Bound, position: int, patience: float) -> None:
        self._fleet, self._patience = fleet, patience
        self.bound = bound
        self.position = position
        """Of the last group that was taken."""
        self._saved = 0
        self._version = 0
        """For which groups were taken ahead: a trainer that has it takes no more for an older one."""
        self._expected: tuple[int, int, Future[list[RolloutGroup]]] | None = None
        """How many groups were asked for ahead, for which version, and their answer."""

    def submit(
        self,
        ids: Sequence[str],
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> int:
        """Hands prompts over, each under an id that no other prompt of the run has. How many of them were new: one that was
        submitted before is not generated again. A prompt without a seed gets one made of its id."""
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if not len(ids) == len(prompts) == len(sampling):
            raise InvalidSampling(
                f"{len(ids)} ids, {len(prompts)} prompts and {len(sampling)} sampling parameters; as many of each, or one "
                "set of parameters for all"
            )
        requests = [_request(id, prompt, how) for id, prompt, how in zip(ids, prompts, sampling)]
        parts = [requests[i : i + SUBMIT_PROMPTS] for i in range(0, len(requests), SUBMIT_PROMPTS)]
        return sum(self._persist(partial(self._fleet.submit, self.bound, part)) for part in parts)

    def take(self, count: int | None = None, timeout: float = 600.0, *, more: bool = False) -> list[RolloutGroup]:
        """The next groups, `bound.batch` of them unless said otherwise, in the order in which they were submitted as far as
        they are finished. Waits for them; `DeadlineExceeded` after `timeout` seconds, and then none is taken.

        Engines generate a batch for each sync, and as far ahead as the bound lets them; who wants more than a batch before
        the next sync says so by `more`."""
        wanted = self.bound.batch if count is None else count
        if wanted < 1:
            raise RolloutError(f"{wanted} groups are asked for; take at least one")
        groups = self._answer(wanted, timeout)
        if groups is None:
            asked = partial(
                self._fleet.take, self.bound, self.position, wanted, timeout, self._saved, self._version, more=more
            )
            try:
                groups = self._persist(asked)
            except (DeadlineExceeded, NotReady):
                self._version = 0  # has its sync failed? Then for the one that serves
                raise
        self.position = groups[-1].position
        return groups

    def expect(self, version: int, count: int | None = None) -> None:
        """Asks for the groups that the next `take` will return, for a trainer that has `version` then: the one that the fleet
        serves, or the one that the next sync will make. Said just before that sync, the answer does not wait for its end.
        Their prompts must have been submitted. Whatever comes in between (a sync that fails, a gateway that dies), `take`
        gives what it would have given."""
        self._unexpect()
        wanted = self.bound.batch if count is None else count
        asked = self._fleet.take(self.bound, self.position, wanted, EXPECT_SECONDS, saved=self._saved, version=version)
        self._expected = wanted, version, portal.start(asked)

    def _unexpect(self) -> None:
        """Nobody waits for it any more."""
        if self._expected is not None:
            self._expected[-1].cancel()
            self._expected = None

    def _answer(self, wanted: int, timeout: float) -> list[RolloutGroup] | None:
        """To what was asked ahead; None if nothing was, or if it must be asked again."""
        if self._expected is None or self._expected[0] != wanted:
            self._unexpect()
            return None
        try:
            _, version, answer = self._expected
            groups = answer.result(timeout)
            self._version = version
            return groups
        except TimeoutError:
            raise DeadlineExceeded(
                f"{wanted} groups that were asked for ahead did not come within {timeout:g} s"
            ) from None
        except (SlipstreamError, CancelledError):
            return None
        finally:
            self._unexpect()

    def saved(self, position: int) -> None:
        """Nobody will go on from before this position: what was made of the groups up to it is safe. Their completions are
        deleted when the next groups are taken."""
        if position > self.position:
            raise RolloutError(f"position {position} is not taken yet; the last that is taken is {self.position}")
        self._saved = max(self._saved, position)

    def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tries again while the gateway is gone, or its engines are not back yet."""
        until = time.monotonic() + self._patience

        async def run() -> T:
            return await call()

        while True:
            try:
                return portal.run(run())
            except (GatewayLost, NotReady):
                if time.monotonic() >= until:
                    raise
                time.sleep(AGAIN_SECONDS)


def _request(id: str, prompt: Prompt, sampling: SamplingParams) -> Request:
    if sampling.seed is None:
        sampling = sampling.with_seed(xxhash.xxh3_64_intdigest(id.encode()) >> 1)
    try:
        return Request(id, prompt if isinstance(prompt, str) else plain_ids(prompt), sampling)
    except SlipstreamError as error:
        raise type(error)(f"prompt {id!r}: {error}") from None
