"""The environment interface for multi-turn rollouts. `multi_turn.py` runs the episodes.

class Guess:
    def reset(self, seed):
        self.number = seed % 10
        return Observation("guess:")

    def step(self, action):
        right = action == str(self.number)
        return Observation("no, again:"), float(right), right
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from slipstream.errors import EnvironmentFailed
from slipstream.rl.rewards.functions import RewardProblem, finite_number, short_repr

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's message to the policy: only what is new, not the conversation so far."""

    text: str
    messages: tuple[Message, ...] = ()
    """Chat messages instead of a text: `({"role": "tool", "content": "7"},)`. They need a chat template."""
    tools: tuple[Message, ...] = ()
    """In the first observation: JSON schemas of tools, as in OpenAI's API, for the chat template."""


Step: TypeAlias = tuple[Observation, float, bool]
"""`(observation, reward, done)`. If done, the policy does not see the observation."""


class Environment(Protocol):
    """Runs one episode at a time. Methods may be `async`. Synchronous methods run in threads: never two at once, but not
    always in the same thread."""

    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        """Start an episode. The episodes of a group get the same seed, and must start alike."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """`action` is the text that the policy sampled in this turn, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    """Text around observations, such as a chat template's. For a model that ends its turns with `<|im_end|>`:

    Markers(
        first="<|im_start|>user\\n",
        before="\\n<|im_start|>user\\n",
        after="<|im_end|>\\n<|im_start|>assistant\\n",
        unfinished="<|im_end|>",
    )
    """

    before: str = ""
    after: str = ""
    first: str | None = None
    """Before the first observation; None uses `before`."""
    unfinished: str = ""
    """Before `before`, if the policy's turn was truncated by its length and so has no end-of-turn token."""


NO_MARKERS = Markers()


def checked_observation(observation: Any, where: str) -> Observation:
    """Validate an observation; `where` prefixes the error."""
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise EnvironmentFailed(
            f"{where} must return an Observation(text), got {short_repr(observation)} ({type(observation).__name__})"
        )
    return observation


def checked_step(stepped: Any, where: str) -> Step:
    """Validate the return value of `step`."""
    if not isinstance(stepped, tuple) or len(stepped) != 3:
        size = f" of {len(stepped)}" if isinstance(stepped, tuple) else ""
        raise EnvironmentFailed(
            f"{where} must return (observation, reward, done), got {short_repr(stepped)} ({type(stepped).__name__}{size})"
        )
    observation, reward, done = stepped
    number = finite_number(reward)
    if isinstance(number, RewardProblem):
        raise EnvironmentFailed(f"{where}: as a reward it {number.what}; {number.fix}")
    if not isinstance(done, bool) and type(done).__name__ not in ("bool", "bool_"):  # numpy's
        raise EnvironmentFailed(f"{where}: done must be True or False, got {short_repr(done)} ({type(done).__name__})")
    return checked_observation(observation, where), number, bool(done)
