"""Environments: what answers the policy between its turns. `rl/rollouts.py` runs episodes with them.

class Guess:
    def reset(self, seed):
        self.number = seed % 10
        return Observation("guess:")

    def step(self, action):
        right = action == str(self.number)
        return Observation("no, again:"), float(right), right
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from slipstream.errors import EnvironmentFailed
from slipstream.rl.reward_functions import Problem, number_from, shown


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment tells the policy: new text only, nothing of what was said before."""

    text: str


Step: TypeAlias = tuple[Observation, float, bool]
"""`(observation, reward, done)`. When done, the observation is not shown to the policy."""


class Environment(Protocol):
    """One episode at a time. Methods may be `async`. Synchronous ones run in threads, never two at once, and not always
    in the same one."""

    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        """Begins an episode. Equal seeds begin alike: the episodes of a group get the same one."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """`action` is what the policy sampled in this turn, as text without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    """Text around what the environment says, such as a chat template's. For a model that ends its turns with `<|im_end|>`:

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
    """In front of the first observation; None takes `before`."""
    unfinished: str = ""
    """In front of `before` when the policy's turn was cut off by its length, and so did not end itself."""


NO_MARKERS = Markers()


def observed(observation: Any, where: str) -> str:
    """An observation's text; `where` begins the error if it is none."""
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise EnvironmentFailed(
            f"{where} must give an Observation(text), got {shown(observation)} ({type(observation).__name__})"
        )
    return observation.text


def checked_step(stepped: Any, where: str) -> tuple[str, float, bool]:
    """What `step` returned, the observation as its text."""
    if not isinstance(stepped, tuple) or len(stepped) != 3:
        size = f" of {len(stepped)}" if isinstance(stepped, tuple) else ""
        raise EnvironmentFailed(
            f"{where} must return (observation, reward, done), got {shown(stepped)} ({type(stepped).__name__}{size})"
        )
    observation, reward, done = stepped
    number = number_from(reward)
    if isinstance(number, Problem):
        raise EnvironmentFailed(f"{where}: as reward it {number.what}; {number.fix}")
    if not isinstance(done, (bool, np.bool_)):
        raise EnvironmentFailed(f"{where}: done must be True or False, got {shown(done)} ({type(done).__name__})")
    return observed(observation, where), number, bool(done)
