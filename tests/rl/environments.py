"""Environments for tests, imported by worker processes."""

from __future__ import annotations

import os
import time
from typing import Any

from slipstream.rl.agents.environments import Observation, Step


class Letters:
    """Rewards each turn by whether the policy's text is the asked letter; ends after `turns` turns. Some seeds misbehave."""

    def __init__(self, turns: int = 2, bad: str = "", every: int = 10, marks: str = "") -> None:
        self.turns, self.bad, self.every, self.marks = turns, bad, every, marks

    def reset(self, seed: int) -> Observation:
        self.letter, self.turn, self.is_bad = "abcd"[seed % 4], 0, seed % self.every == 0
        return Observation(f"{self.letter}=")

    def step(self, action: str) -> Step:
        self.turn += 1
        if self.is_bad and self.turn == self.turns:
            self.misbehave()
        return Observation(f"{self.letter}."), float(action == self.letter), self.turn == self.turns

    def misbehave(self) -> Any:
        if self.marks:
            with open(self.marks, "a") as file:
                file.write("x")
        match self.bad:
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise ValueError("no box")


class Chatty:
    """Observations as chat messages, with a tool's answer."""

    def reset(self, seed: int) -> Observation:
        return Observation("", ({"role": "user", "content": f"b{seed}"},), ({"type": "function"},))

    def step(self, action: str) -> Step:
        return Observation("", ({"role": "tool", "content": "7"},)), 0.5, False
