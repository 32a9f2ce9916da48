"""Formats prompts with a model's chat template (`model/chat_template.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slipstream.model.chat_template import ChatTemplate

Message: TypeAlias = Mapping[str, Any]
Conversations: TypeAlias = Mapping[str, Sequence[Message]]

_MARK = "slipstream"
"""A recognizable answer in a rendered chat."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Renders a prompt as a conversation that awaits the model's answer."""

    template: ChatTemplate
    system: str = ""
    """System message; empty leaves it to the template."""
    conversations: Conversations = field(default_factory=dict)
    """Messages by prompt, for prompts that are more than one user message."""

    def prompt(self, text: str) -> str:
        return self.render(self.conversations.get(text) or [user_message(text)])

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        return self.template.render([*self._system(messages), *messages], tools)

    def after_answer(self, messages: Sequence[Message] = (), tools: Sequence[Message] | None = None) -> str:
        """The text that the template puts after an answer: the end of the turn, and further `messages` with the start of the
        next answer."""
        answered = [user_message("?"), {"role": "assistant", "content": _MARK}, *messages]
        chat = [*self._system(answered), *answered]
        return self.template.render(chat, tools, add_generation_prompt=bool(messages)).rpartition(_MARK)[2]

    def _system(self, messages: Sequence[Message]) -> list[Message]:
        has_system = not self.system or messages[0]["role"] == "system"
        return [] if has_system else [{"role": "system", "content": self.system}]


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text.strip()}
