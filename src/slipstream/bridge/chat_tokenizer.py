"""A model's tokenizer together with its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.engines.frontend.request_parser import longest_token, read_tokenizer, too_many_characters
from slipstream.errors import ConfigError, InvalidPrompt, Unsupported
from slipstream.model.chat_template import ChatTemplate
from slipstream.model.checkpoints.hub import model_directory

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTokenizer:
    """Without a tokenizer, tokens have no text and are shown by their ids."""

    def __init__(self, tokenizer: Any = None, template: ChatTemplate | None = None) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self._tokenizer, self._template = tokenizer, template
        self._longest_token = 0 if tokenizer is None else longest_token(tokenizer)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def read(cls, model: str | Path) -> ChatTokenizer:
        """Read an HF directory or a model of the Hub: `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, all
        of them optional."""
        directory = model_directory(model, weights=False)
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory; the model's tokenizer is read from it")
        return cls(read_tokenizer(directory), ChatTemplate.read(directory))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode as the engines do; empty without a tokenizer."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True) if self._tokenizer is not None else ""

    def token_text(self, token: int, as_token_id: bool = False) -> str:
        """Decode a single token. A part of a character decodes to a replacement character."""
        if as_token_id or self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._token_texts:  # bounded by the vocabulary
            self._token_texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._token_texts[token]

    def encode_chat(self, max_length: int, *conversation: Any) -> tuple[int, ...]:
        """Return the prompt of a conversation as token ids. A text that is too long for `max_length` tokens is refused without
        encoding it. The other arguments are those of `render_chat`."""
        text = self.render_chat(*conversation)
        if self._tokenizer is None:
            raise Unsupported(
                "chat needs the model's tokenizer.json, which is not known here; send token ids as the prompt, or name the "
                "model: model=DIRECTORY_OR_NAME of connect or of the HTTP server"
            )
        if len(text) > max_length * self._longest_token:
            raise too_many_characters(len(text), max_length)
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise InvalidPrompt("the chat template renders these messages to an empty prompt")
        return tuple(tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        if self._template is None:
            raise Unsupported(
                "no chat template is known here (chat_template.jinja, or in the model's tokenizer_config.json); send a "
                "rendered prompt, or name a model that has one: model=DIRECTORY_OR_NAME of connect or of the HTTP server"
            )
        normalized = [_normalize_message(message, index) for index, message in enumerate(messages)]
        return self._template.render(normalized, tools, template_kwargs, add_generation_prompt)


def _normalize_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Join the content to one string, as templates of text models expect, and copy reasoning to each name they use."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidPrompt(f"messages[{index}] has no role; each message is an object with role and content")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidPrompt(f"messages[{index}] has parts that are not text; the engines take only text")
        message["content"] = "\n".join(map(str, texts))
    elif content is not None and not isinstance(content, str):
        raise InvalidPrompt(f"the content of messages[{index}] must be a string or a list of text parts")
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message
