"""Fakes of the vLLM modules that our code imports, for environments without vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """That there are these modules, with nothing else in them, and the packages that they are in. All of them, by path."""
    made: dict[str, ModuleType] = {}
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            made.setdefault(package, ModuleType(package))
        vars(made[path]).update(names)
    for path, module in made.items():
        monkeypatch.setitem(sys.modules, path, module)
    return made


@contextmanager
def imported(path: str) -> Iterator[Any]:
    """A module of ours that sees them; afterwards it is as if nobody had imported it."""
    sys.modules.pop(path, None)
    try:
        yield importlib.import_module(path)
    finally:
        sys.modules.pop(path, None)
