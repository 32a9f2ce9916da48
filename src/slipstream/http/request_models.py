"""Base class of pydantic models for JSON bodies."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that OpenAI's clients send and that have no effect on a completion."""


class JsonModel(BaseModel):
    """Rejects unknown fields: a misspelled `temperature` that is silently ignored can cost a training run. Values are not
    converted: "5" is not an integer, and neither is true. A field with a default may be null. A field annotated `None` is
    one that other servers have and this one does not support."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, values = cls.model_fields, {}
        for name, value in given.items():
            if name in fields:
                if value is None and not fields[name].is_required():
                    continue
                is_integral = isinstance(value, float) and value.is_integer()
                values[name] = int(value) if is_integral else value  # JSON does not distinguish 1.0 from 1
            elif name not in IGNORED:
                context = {"name": name[:100], "message": unknown_field(name, fields)}
                raise PydanticCustomError("unknown_field", "{message}", context)
        return values


def unknown_field(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown field {reprlib.repr(name)}; {hint}"
