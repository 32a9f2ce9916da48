"""The front's description of itself, in OpenAPI's format, made of the same tables that it checks calls with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream import __version__
from slipstream.http import shapes
from slipstream.http.exchange import Call

_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}
_REFUSALS = {
    "400": "The call does not fit; the message says where.",
    "401": "The token is missing or wrong.",
    "404": "There is no such model or engine.",
    "405": "The path has another method.",
    "408": "The body came too slowly.",
    "409": "Something else is under way, or has ended this.",
    "413": "The body is too large.",
    "500": "An engine or the front failed inside.",
    "503": "No engine can do it now.",
    "504": "It took too long.",
}


def description(calls: Sequence[Call]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__, "description": "A fleet of engines over HTTP."},
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
        "security": [{"token": []}],
    }


def _operation(call: Call) -> dict[str, Any]:
    name = call.path.strip("/").replace("/", "_").replace(".", "_") or "root"
    done: dict[str, Any] = {
        call.answers: {"schema": {"type": "object"} if "json" in call.answers else {"type": "string"}}
    }
    if call.is_given_up and call.path.startswith("/v1"):
        done["text/event-stream"] = {"schema": {}}
    found: dict[str, Any] = {
        "operationId": f"{call.method.lower()}_{name}",
        "summary": call.says,
        "responses": {
            "200": {"description": "Done.", "content": done},
            **{status: _refusal(text) for status, text in _REFUSALS.items()},
        },
    }
    if call.query is not None:
        found["parameters"] = shapes.query_parameters(call.query)
    if call.body is not None:
        schema = shapes.schema(call.body)
        is_needed = "required" in schema
        found["requestBody"] = {"required": is_needed, "content": {"application/json": {"schema": schema}}}
    if call.path == "/health":
        found["security"] = []
    return found


def _refusal(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
