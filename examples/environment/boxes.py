"""An environment of several turns: a digit from 0 to 2 lies in a box, and the policy may look before it answers.

    environment   b4=           box 4
    policy        ?             look into it
    environment   2.            the digit
    policy        2             answer

Looking earns 0.2, a digit as an answer 0.1, the right one 1."""

from __future__ import annotations

from slipstream.rl.agents.environments import Observation, Step


class Boxes:
    def reset(self, seed: int) -> Observation:
        self.digit, self.has_looked = str(seed // 10 % 3), False
        return Observation(f"b{seed % 10}=")

    def step(self, action: str) -> Step:
        if action == "?" and not self.has_looked:
            self.has_looked = True
            return Observation(f"{self.digit}."), 0.2, False
        reward = 1.0 if self.has_looked and action == self.digit else 0.1 * action.isdigit()
        return Observation(""), reward, True
