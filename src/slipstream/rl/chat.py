"""A task's prompts as a chat model expects them: its own chat template (`model/chat.py`) around the text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ConfigError, InvalidPrompt
from slipstream.model.chat import TEMPLATE_FILE, TOKENIZER_FILE, ChatTemplate
from slipstream.rl.config import TaskConfig
from slipstream.rl.tokens import Codec

_MARK = "slipstream"
"""An answer to look for in a rendered chat."""


def codec_of(task: TaskConfig, directory: str | Path) -> Codec:
    """How a task's prompts become tokens of the model in `directory`: as they are, or as a chat."""
    if not task.chat:
        return Codec(directory)
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(
            f"task.chat is set, but {directory} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
            f"{TOKENIZER_FILE}. Is it a base model? Then leave task.chat out"
        )
    try:
        return Codec(directory, Chat(template, task.system))
    except InvalidPrompt as error:  # it takes no question of this task
        raise ConfigError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Chat:
    """A question as a conversation that the model is to answer."""

    template: ChatTemplate
    system: str = ""
    """What the model is told before it is asked; empty leaves it to the template."""

    def prompt(self, text: str) -> str:
        return self.template.render(self._messages(text))

    def after_answer(self) -> str:
        """What the template puts behind an answer: the end of the turn comes first in it."""
        answered = [*self._messages("?"), {"role": "assistant", "content": _MARK}]
        return self.template.render(answered, add_generation_prompt=False).rpartition(_MARK)[2]

    def _messages(self, text: str) -> list[dict[str, str]]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        return [*told, {"role": "user", "content": text.strip()}]
