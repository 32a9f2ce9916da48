"""Formats prompts with a model's chat template (`model/chat_template.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.model.chat_template import ChatTemplate

_MARK = "slipstream"
"""A recognizable answer in a rendered chat."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Renders a prompt as a conversation that awaits the model's answer."""

    template: ChatTemplate
    system: str = ""
    """System message; empty leaves it to the template."""

    def prompt(self, text: str) -> str:
        return self.template.render(self._messages(text))

    def after_answer(self) -> str:
        """The text that the template puts after an answer; it starts with the end of the turn."""
        answered = [*self._messages("?"), {"role": "assistant", "content": _MARK}]
        return self.template.render(answered, add_generation_prompt=False).rpartition(_MARK)[2]

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text.strip()}]
