"""Requirements leave out releases with known vulnerabilities."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("advisories", ROOT / "tools" / "advisories.py")
assert _spec is not None and _spec.loader is not None
advisories = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(advisories)


def test_no_requirement_permits_a_vulnerable_release():
    assert list(advisories.problems((ROOT / "pyproject.toml").read_text())) == []


def test_a_bound_that_is_too_low_or_missing_is_named():
    lax = (
        (ROOT / "pyproject.toml")
        .read_text()
        .replace('"starlette>=1.3.1"', '"starlette>=1.3"')
        .replace('  "h11>=0.16",\n', "")
    )
    assert [text.partition(" permits")[0] for text in advisories.problems(lax)] == [
        "pyproject.toml, dependencies: starlette>=1.3",
        "pyproject.toml: h11 is not required",
    ]
