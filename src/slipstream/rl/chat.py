"""Prompts as a chat model expects them: its own chat template around the task's text.

A template is a Jinja program that comes with the model (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`).
It is rendered as `transformers` does, in a sandbox: a model directory is data, and may come from anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.rl.config import TaskConfig
from slipstream.rl.tokens import Codec

TEMPLATE_FILE, TOKENIZER_FILE = "chat_template.jinja", "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MARK = "slipstream"
"""An answer to look for in a rendered chat."""


def codec_of(task: TaskConfig, directory: str | Path) -> Codec:
    """How a task's prompts become tokens of the model in `directory`: as they are, or as a chat."""
    return Codec(directory, Chat(ChatTemplate.read(directory), task.system) if task.chat else None)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    source: str
    special_tokens: dict[str, str]
    """By the names that templates know: `{"eos_token": "<|im_end|>"}`."""

    @classmethod
    def read(cls, directory: str | Path) -> ChatTemplate:
        """`ConfigError` for a directory without one: a model that was not trained on chats."""
        directory = Path(directory)
        facts = _facts(directory / TOKENIZER_FILE)
        source = facts.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((each.get("template") for each in source if each.get("name") == "default"), None)
        if (directory / TEMPLATE_FILE).exists():
            source = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
        if not isinstance(source, str) or not source:
            raise ConfigError(
                f"task.chat is set, but {directory} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
                f"{TOKENIZER_FILE}. Is it a base model? Then leave task.chat out"
            )
        named = {name: _content(facts.get(name)) for name in _SPECIAL_TOKENS}
        return cls(source, {name: token for name, token in named.items() if token})

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """As `tokenizer.apply_chat_template(messages, tokenize=False, …)` of `transformers`."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            return environment.from_string(self.source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the model's chat template does not take messages of {roles}: {error}") from None


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


def _facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return facts


def _content(token: Any) -> str:
    """Special tokens are texts, or objects with the text inside."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    import jinja2

    raise jinja2.TemplateError(message)
