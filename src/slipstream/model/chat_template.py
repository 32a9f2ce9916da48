"""A model's chat template, which renders conversations as prompts.

A template is a Jinja program in the model directory (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`).
It is rendered as `transformers` does, in a sandbox: model directories are untrusted data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, InvalidPrompt

TEMPLATE_FILE, TOKENIZER_FILE, SPECIALS_FILE = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    special_tokens: Mapping[str, str]
    """Special tokens by their name in templates: `{"eos_token": "<|im_end|>"}`."""

    @classmethod
    def read(cls, directory: str | Path) -> ChatTemplate | None:
        """Read the template of a model directory; return None if it has none."""
        directory = Path(directory)
        tokenizer_config = _json(directory / TOKENIZER_FILE)
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several templates with names
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if (directory / TEMPLATE_FILE).exists():
            source = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
        if not isinstance(source, str) or not source:
            return None
        # Special tokens are strings, or objects with the string in `content`.
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in (_json(directory / SPECIALS_FILE) | tokenizer_config).items()
        }
        template = cls(source, {name: text for name in _SPECIALS if isinstance(text := texts.get(name), str)})
        _ = template._compiled  # an invalid template is an error of the directory, not of a conversation
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages, as `tokenizer.apply_chat_template(messages, tokenize=False, …)` of `transformers` does. `more` holds
        further variables of the template (`chat_template_kwargs`)."""
        from jinja2 import TemplateError

        variables = {**self.special_tokens, **(more or {})}
        variables |= {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(self._compiled.render(variables))
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise InvalidPrompt(f"the model's chat template rejects these messages (roles: {roles}): {error}") from None
        except (RecursionError, MemoryError):
            raise InvalidPrompt(
                "rendering the model's chat template for these messages needs too much memory"
            ) from None

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The `{% generation %}` tag, with which templates mark the assistant's text; renders its body."""

            tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template has a syntax error: {error}") from None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
