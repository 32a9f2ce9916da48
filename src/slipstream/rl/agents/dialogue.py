"""An environment's observations as tokens: plain text between markers, or messages in the model's chat template.

New text is encoded alone, behind the tokens that the engine has seen and sampled. No text is tokenized twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.errors import EnvironmentFailed
from slipstream.rl.agents.environments import Markers, Message, Observation
from slipstream.rl.data.chat import Chat, user_message
from slipstream.rl.data.tokens import Codec
from slipstream.types import Completion


class Dialogue(Protocol):
    """The tokens of one episode's observations."""

    def first(self, observation: Observation) -> tuple[int, ...]: ...

    def next(self, observation: Observation, last: Completion) -> tuple[int, ...]:
        """The tokens between the policy's turn `last` and its next one."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedText:
    codec: Codec
    markers: Markers

    def first(self, observation: Observation) -> tuple[int, ...]:
        markers = self.markers
        before = markers.before if markers.first is None else markers.first
        return self.codec.prompts([before + self._text(observation) + markers.after])[0]

    def next(self, observation: Observation, last: Completion) -> tuple[int, ...]:
        """Encode without the tokenizer's beginning-of-sequence token."""
        markers, is_truncated = self.markers, last.finish_reason == "length"
        text = (markers.unfinished if is_truncated else "") + markers.before + self._text(observation) + markers.after
        return self.codec.answers([text])[0]

    def _text(self, observation: Observation) -> str:
        if observation.messages:
            raise EnvironmentFailed("the observation has chat messages, which need environment.chat = true")
        return observation.text


class ChatDialogue:
    def __init__(self, codec: Codec, chat: Chat) -> None:
        self._codec, self._chat = codec, chat
        self._tools: tuple[Message, ...] | None = None

    def first(self, observation: Observation) -> tuple[int, ...]:
        self._tools = observation.tools or None
        return self._codec.answers([self._chat.render(_messages(observation), self._tools)])[0]

    def next(self, observation: Observation, last: Completion) -> tuple[int, ...]:
        text = self._chat.after_answer(_messages(observation), self._tools)
        ids = self._codec.answers([text])[0]
        # The template starts with the end of the policy's turn, which it has sampled itself unless it was truncated.
        return ids[1:] if last.token_ids[-1:] == ids[:1] else ids


def _messages(observation: Observation) -> tuple[Message, ...]:
    return observation.messages or (user_message(observation.text),)
