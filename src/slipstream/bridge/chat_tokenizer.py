"""A model's tokenizer together with its chat template."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.engines.frontend.request_parser import longest_token, read_tokenizer, too_many_characters
from slipstream.errors import ConfigError, InvalidPrompt, Unsupported
from slipstream.model.chat_template import ChatTemplate
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.tool_calls import ToolFormat, tool_format

_REPLY = f"reply-{secrets.token_hex(12)}"
"""Stands for a reply whose tokens are known. No client can guess it."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTokenizer:
    """Without a tokenizer, tokens have no text and are shown by their ids."""

    def __init__(self, tokenizer: Any = None, template: ChatTemplate | None = None) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self._tokenizer, self._template = tokenizer, template
        self._longest_token = 0 if tokenizer is None else longest_token(tokenizer)
        self._token_texts: dict[int, str] = {}
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        self.tool_format: ToolFormat | None = tool_format(template.source) if template is not None else None
        """How the model writes tool calls; None if that is not known."""

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
        tokens = self._encode(self.render_chat(*conversation), max_length)
        if not tokens:
            raise InvalidPrompt("the chat template renders these messages to an empty prompt")
        return tokens

    def encode_appended(
        self,
        max_length: int,
        messages: Sequence[Mapping[str, Any]],
        num_known: int,
        is_closed: bool,
        *options: Any,
    ) -> tuple[int, ...] | None:
        """Return the tokens that follow a reply, `messages[num_known - 1]`, whose own tokens are known: the end of its turn,
        the messages after it, and the start of the next reply. None if the template does not tell them apart from the reply.

        `is_closed` says that the known tokens end with a special token, which ends the turn instead of the template's. Rendered
        with a placeholder for the reply, so that a template which rewrites earlier turns has nothing to rewrite."""
        reply = {"role": "assistant", "content": _REPLY}
        try:
            text = self.render_chat([*messages[: num_known - 1], reply, *messages[num_known:]], *options)
        except InvalidPrompt:  # for example, because a tool's answer must follow a call
            return None
        if text.count(_REPLY) != 1:
            return None
        tokens = self._encode(text.partition(_REPLY)[2], max_length)
        return tokens[1:] if is_closed and self.is_special(tokens[:1]) else tokens

    def is_special(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens is a special one, such as the end of a turn."""
        return len(tokens) > 0 and tokens[-1] in self._special

    def _encode(self, text: str, max_length: int) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise Unsupported(
                "chat needs the model's tokenizer.json, which is not known here; send token ids as the prompt, or name the "
                "model: model=DIRECTORY_OR_NAME of connect or of the HTTP server"
            )
        if len(text) > max_length * self._longest_token:
            raise too_many_characters(len(text), max_length)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

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
    """Join the content to one string, as templates of text models expect, copy reasoning to each name they use, and parse the
    arguments of tool calls, which OpenAI's clients send as text."""
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
    elif content is None:
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_parsed_call(call, index) for call in message["tool_calls"]]
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _parsed_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPrompt(f"messages[{index}] has a tool call without a function and its name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # then it stays as the model wrote it
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
