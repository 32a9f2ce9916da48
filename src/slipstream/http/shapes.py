"""Bodies and queries of calls as frozen dataclasses: checked against their annotations, and described as JSON schemas.

    @dataclass(frozen=True)
    class SleepQuery:
        level: Annotated[int, Limits(0, 2)] = 1

Limits are both enforced and described. A field with a default may be left out, or be null. A field annotated `None` is one
that other servers know and this one does not."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from slipstream.http.answers import HttpError

T = TypeVar("T")

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""What OpenAI's clients may say and no completion depends on."""

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of a number's value, and of how many a list or a text may have."""

    minimum: float | None = None
    maximum: float | None = None
    min_items: int | None = None
    max_length: int | None = None

    def check(self, value: Any) -> None:
        if isinstance(value, (int, float)):
            if self.minimum is not None and value < self.minimum:
                raise _Unfit(f"at least {self.minimum}")
            if self.maximum is not None and value > self.maximum:
                raise _Unfit(f"at most {self.maximum}")
        elif self.min_items is not None and len(value) < self.min_items:
            raise _Unfit(f"a list of at least {self.min_items}")
        elif self.max_length is not None and len(value) > self.max_length:
            raise _Unfit(f"at most {self.max_length} characters long")

    @property
    def keywords(self) -> dict[str, Any]:
        """In JSON Schema."""
        words = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "minItems": self.min_items,
            "maxLength": self.max_length,
        }
        return {key: value for key, value in words.items() if value is not None}


class _Unfit(Exception):
    """Says what was expected."""


def parse(cls: type[T], value: Any, ignored: tuple[str, ...] = ()) -> T:
    """The dataclass that a JSON object describes. Raises a 400 that names the field."""
    if not isinstance(value, Mapping):
        raise HttpError(400, f"the body must be a JSON object, got {_shown(value)}", "invalid_type")
    hints, known = _hints(cls), {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fields: dict[str, Any] = {}
    for key, item in value.items():
        if key not in known:
            if key in ignored:
                continue
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise HttpError(400, f"unknown field {_shown(key)}; {hint}", "unknown_field", str(key)[:100])
        if item is None and not _is_required(known[key]):
            continue
        if hints[key] is type(None):
            raise HttpError(400, f"{key} is not supported here; leave it out", "unsupported", key)
        try:
            fields[key] = _fit(hints[key], item)
        except _Unfit as unfit:
            raise HttpError(400, f"{key} must be {unfit}, got {_shown(item)}", "invalid_value", key) from None
    for name, declared in known.items():
        if name not in fields and _is_required(declared):
            raise HttpError(400, f"{name} is missing", "missing_field", name)
    return cls(**fields)


def parse_query(cls: type[T], pairs: list[tuple[str, str]]) -> T:
    """As `parse`, from a query string: texts become what the field is. A field that is a list may come several times."""
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    value: dict[str, Any] = {}
    for key, text in pairs:
        hint = hints.get(key, str)
        if _is_list(hint):
            value.setdefault(key, []).append(text)
        elif key in value:
            raise HttpError(400, f"{key} came twice", "invalid_value", key)
        else:
            value[key] = _from_text(_bare(hint)[0], text)
    return parse(cls, value)


@cache
def schema(cls: type) -> dict[str, Any]:
    """JSON Schema of an object."""
    hints = _hints(cls)
    fields = [f for f in dataclasses.fields(cls) if hints[f.name] is not type(None)]
    properties = {}
    for declared in fields:
        described = _described(hints[declared.name])
        properties[declared.name] = described if _is_required(declared) else _nullable(described)
    required = [f.name for f in fields if _is_required(f)]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def query_parameters(cls: type) -> list[dict[str, Any]]:
    """As OpenAPI lists them."""
    hints = _hints(cls)
    return [
        {"name": f.name, "in": "query", "required": _is_required(f), "schema": _described(hints[f.name])}
        for f in dataclasses.fields(cls)
    ]


def _fit(hint: Any, value: Any) -> Any:
    hint, limits = _bare(hint)
    fitted = _fit_type(hint, value)
    limits.check(fitted)
    return fitted


def _fit_type(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        expected = []
        for choice in arguments:
            try:
                return _fit(choice, value)
            except _Unfit as unfit:
                expected.append(str(unfit))
        raise _Unfit(" or ".join(dict.fromkeys(expected)))
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise _Unfit(" or ".join(map(repr, arguments)))
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _Unfit("a list")
        return [_fit(arguments[0], item) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise _Unfit("an object")
        return {key: _fit(arguments[1], item) for key, item in value.items()}
    if hint is type(None):
        if value is not None:
            raise _Unfit("null")
        return None
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON does not tell 1.0 from 1
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 10**300:
            raise _Unfit("a number that a computer has")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _Unfit(f"a {_NAMES[hint]}" if hint is not int else "an integer")
    return value


def _is_list(hint: Any) -> bool:
    hint, _ = _bare(hint)
    return get_origin(hint) is list or any(get_origin(choice) is list for choice in get_args(hint))


def _from_text(hint: Any, text: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not type(None))
    if hint is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if hint is int:
        try:
            return int(text)
        except ValueError:
            return text
    return text


def _described(hint: Any) -> dict[str, Any]:
    hint, limits = _bare(hint)
    rules = limits.keywords
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_described(choice) for choice in arguments], **rules}
    if origin is Literal:
        return {"enum": list(arguments), **rules}
    if origin is list:
        return {"type": "array", "items": _described(arguments[0]), **rules}
    if origin is dict:
        return {"type": "object", "additionalProperties": _described(arguments[1]), **rules}
    return {"type": "null" if hint is type(None) else _NAMES[hint], **rules}


def _nullable(described: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [described, {"type": "null"}]} if described else {}


def _bare(hint: Any) -> tuple[Any, Limits]:
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1]
    return hint, Limits()


def _is_required(declared: Any) -> bool:
    return declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
