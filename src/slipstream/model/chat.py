"""A model's chat template: conversations as the text that the model was trained on.

A template is a Jinja program that comes with the model (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`).
It is rendered as `transformers` does, in a sandbox: a model directory is data, and may come from anywhere."""

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
    """By the names that templates know: `{"eos_token": "<|im_end|>"}`."""

    @classmethod
    def read(cls, directory: str | Path) -> ChatTemplate | None:
        """None for a model that was not trained on chats."""
        directory = Path(directory)
        facts = _json(directory / TOKENIZER_FILE)
        source = facts.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((each.get("template") for each in source if each.get("name") == "default"), None)
        if (directory / TEMPLATE_FILE).exists():
            source = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
        if not isinstance(source, str) or not source:
            return None
        found = _json(directory / SPECIALS_FILE) | facts
        # Special tokens are texts, or objects with the text inside.
        texts = {name: found[name].get("content") if isinstance(found[name], dict) else found[name] for name in found}
        template = cls(source, {name: text for name in _SPECIALS if isinstance(text := texts.get(name), str)})
        _ = template._compiled  # one that is no template is an error of the directory, not of a conversation
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """As `tokenizer.apply_chat_template(messages, tokenize=False, …)` of `transformers`. `more` is what else the template
        may know (`chat_template_kwargs`)."""
        from jinja2 import TemplateError

        known = {**self.special_tokens, **(more or {})}
        known |= {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": known.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(self._compiled.render(known))
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise InvalidPrompt(f"the model's chat template does not take messages of {roles}: {error}") from None
        except (RecursionError, MemoryError):
            raise InvalidPrompt("the model's chat template takes these messages too far") from None

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, with which templates mark what the assistant says: its body, and nothing else."""

            tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def complain(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": complain, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is no template: {error}") from None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
