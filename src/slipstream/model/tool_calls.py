"""Tool calls in a model's text, in the formats of the common chat templates. Pure, and incremental for streaming.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them     Hermes, Qwen 2.5, Qwen3
    llama    {"name": "add", "parameters": {"a": 1}}, several separated by ";"                     Llama 3.1 and later

Llama's `<|python_tag|>` before the JSON is a special token and not part of the text. What is not a valid call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ToolFormat: TypeAlias = Literal["hermes", "llama"]

_START, _END = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"
_LLAMA = re.compile(rf"\s*(?:{re.escape(_TAG)})?\s*(?=\{{)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as the model wrote it where that is possible."""

    def row(self, call_id: str) -> dict[str, Any]:
        """The call in a message of OpenAI's API."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


ParseCalls: TypeAlias = Callable[[str], tuple[str, Sequence[ToolCall]]]
"""From a turn's text to its text without calls, and the calls."""


def assistant_message(content: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of OpenAI's API. `rows` are its calls (`ToolCall.row`)."""
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not rows else None}
    return message | {"tool_calls": list(rows)} if rows else message


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks the model for; None if it is not one of ours."""
    if _START in template:
        return "hermes"
    return "llama" if "<|start_header_id|>" in template else None


class ToolCallParser:
    """Separates the text of one completion into content and calls. Content is given out as soon as it cannot be the start of a
    call; whitespace before a call, and at the end after one, is dropped."""

    def __init__(self, format: ToolFormat) -> None:
        self._format, self._held, self._is_content, self._has_calls = format, "", False, False

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are complete with this text."""
        self._held += text
        if self._format == "hermes":
            return self._add_hermes()
        if not self._is_content and (_LLAMA.match(self._held) or self._may_become_llama()):
            return "", []  # JSON, or it may become JSON
        self._is_content = True
        return self._release(len(self._held)), []

    def finish(self, text: str = "") -> tuple[str, list[ToolCall]]:
        """Return what is left at the end of the completion."""
        content, calls = self.add(text)
        if self._format == "llama" and (start := _LLAMA.match(self._held)):
            calls = _llama_calls(self._held[start.end() :])
            self._held = "" if calls else self._held
        if self._has_calls and self._held.isspace():
            self._held = ""
        return content + self._release(len(self._held)), calls

    def _add_hermes(self) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        while (start := self._held.find(_START)) >= 0:
            end = self._held.find(_END, start)
            if end < 0:
                return content + self._release(len(self._held[:start].rstrip())), calls
            call = _call(self._held[start + len(_START) : end], "arguments")
            end += len(_END)
            if call is None:
                content += self._release(end)
            else:
                content += self._held[:start].rstrip()
                self._held = self._held[end:]
                calls.append(call)
                self._has_calls = True
        partial = next((n for n in range(len(_START) - 1, 0, -1) if self._held.endswith(_START[:n])), 0)
        return content + self._release(len(self._held[: len(self._held) - partial].rstrip())), calls

    def _may_become_llama(self) -> bool:
        return _TAG.startswith(self._held.strip())

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released


def _llama_calls(text: str) -> list[ToolCall]:
    """Parse `{...}; {...}`; return nothing unless all of it is calls."""
    calls, decoder = list[ToolCall](), json.JSONDecoder()
    while text := text.strip().lstrip(";").strip():
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        call = _call(text[:end], "parameters", "arguments")
        if call is None:
            return []
        calls.append(call)
        text = text[end:]
    return calls


def _call(text: str, *keys: str) -> ToolCall | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models write the object as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
