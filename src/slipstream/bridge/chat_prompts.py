"""Conversations as prompts: the model's chat template renders them on the caller's side, as the HTTP server does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.errors import InvalidPrompt, SlipstreamError
from slipstream.types import Messages, Prompt, Prompts

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
"""JSON schemas of tools, as in OpenAI's API."""


class ChatOptions(TypedDict, total=False):
    tools: Tools
    chat_template_kwargs: Mapping[str, Any] | None


class ChatPrompts:
    """`read` returns the model's tokenizer and `max_length` the engines' context length; both are called when needed."""

    def __init__(self, read: Callable[[], ChatTokenizer], max_length: Callable[[], int]) -> None:
        self._read, self._max_length = read, max_length
        self._tokenizer: ChatTokenizer | None = None
        self._length = 0

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Read on first use."""
        if self._tokenizer is None:
            self._tokenizer = self._read()
        return self._tokenizer

    def render(
        self, prompts: Prompts, tools: Tools = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> Sequence[Prompt]:
        """Return the prompts with each conversation as token ids. `tools` and `template_kwargs` are for all conversations."""
        if isinstance(prompts, str):
            raise InvalidPrompt("prompts is one string; pass a list of prompts")
        rows = cast(Sequence[Prompt | Messages], [prompts] if is_conversation(prompts) else prompts)
        if not any(map(is_conversation, rows)):
            if tools or template_kwargs:
                raise InvalidPrompt(
                    "tools and chat_template_kwargs are for conversations; no prompt is a list of messages"
                )
            return cast(Sequence[Prompt], rows)
        self._length = self._length or self._max_length()
        options = _plain("tools", tools), _plain("chat_template_kwargs", template_kwargs)
        rendered: list[Prompt] = []
        for index, row in enumerate(rows):
            if not is_conversation(row):
                rendered.append(cast(Prompt, row))
                continue
            try:
                rendered.append(self.tokenizer.encode_chat(self._length, _plain("messages", row), *options))
            except SlipstreamError as error:
                raise type(error)(f"prompt {index} of {len(rows)}: {error}") from None
        return rendered


def is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _plain(what: str, value: Any) -> Any:
    """Return a copy that is plain JSON: the template is a program of the model's author, and must get nothing else."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPrompt(f"{what} must be plain data, as in JSON: {error}") from None
