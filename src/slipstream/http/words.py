"""A model's text: its tokenizer, and its chat template (`model/chat.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.engines.intake import read_tokenizer
from slipstream.errors import ConfigError, InvalidPrompt, Unsupported
from slipstream.model.chat import ChatTemplate

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Words:
    """Of one HF directory; of none, it only knows tokens by their numbers."""

    def __init__(self, tokenizer: Any = None, template: ChatTemplate | None = None) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self._tokenizer, self._template = tokenizer, template
        self._texts: dict[int, str] = {}

    @classmethod
    def read(cls, directory: Path) -> Words:
        """As HF keeps them: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`. All may be absent."""
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory; the HTTP front reads a model's tokenizer from there")
        return cls(read_tokenizer(directory), ChatTemplate.read(directory))

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the tokenizer adds by itself, as engines do."""
        return tuple(self._needed("count tokens of text").encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """As engines do; empty without a tokenizer."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True) if self._tokenizer is not None else ""

    def token(self, token: int, as_id: bool = False) -> str:
        """One token's own text. Those that are parts of a character have none that others could read."""
        if as_id or self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:  # there are as many as the vocabulary has
            self._texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._texts[token]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """A conversation as the tokens of a prompt. `more` is what else the template may know (`chat_template_kwargs`)."""
        text = self.render(messages, tools, more, add_generation_prompt)
        tokens = self._needed("render a chat").encode(text, add_special_tokens=False).ids
        if not tokens:
            raise InvalidPrompt("the chat template makes no tokens of these messages")
        return tuple(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        if self._template is None:
            raise Unsupported(
                "this model has no chat template (chat_template.jinja, or in tokenizer_config.json); send /v1/completions the "
                "prompt as it is to be, or name a model directory that has one (model=…)"
            )
        told = [_message(message, index) for index, message in enumerate(messages)]
        return self._template.render(told, tools, more, add_generation_prompt)

    def _needed(self, doing: str) -> Any:
        if self._tokenizer is None:
            raise Unsupported(
                f"the HTTP front has no tokenizer to {doing}; send token ids, or start it with model=DIRECTORY"
            )
        return self._tokenizer


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """With its content as one text, which is what templates of text models expect; reasoning under each of its names."""
    if not isinstance(message.get("role"), str):
        raise InvalidPrompt(f"messages[{index}] has no role; each message is an object with role and content")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidPrompt(f"messages[{index}] has parts that are no text; the engines take text alone")
        message["content"] = "\n".join(map(str, texts))
    elif content is not None and not isinstance(content, str):
        raise InvalidPrompt(f"the content of messages[{index}] must be text, or a list of parts of text")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message
