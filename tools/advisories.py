"""Check that no requirement permits a release with a known vulnerability, and that none is installed here.

    python tools/advisories.py

`make check` runs this. The database of advisories is not always reachable, so those that concern this project are listed here,
each with the first release that has the fix; `pip-audit` finds new ones."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

FIXED = {
    "cryptography": ("46.0.7", "CVE-2024-12797, CVE-2026-26007, CVE-2026-34073, CVE-2026-39892"),
    "h11": ("0.16.0", "CVE-2025-43859: request smuggling by chunks"),
    "jinja2": ("3.1.6", "CVE-2025-27516: escape from the sandbox"),
    "protobuf": ("6.33.5", "CVE-2025-4565, CVE-2026-0994: recursion without bound"),
    "pytest": ("9.0.3", "CVE-2025-71176: predictable directories in /tmp"),
    "ray": ("2.54.0", "CVE-2025-62593, CVE-2026-27482: calls of a browser to the dashboard"),
    "requests": ("2.32.4", "CVE-2024-47081: credentials sent to another host"),
    "setuptools": ("78.1.1", "CVE-2025-47273: path traversal"),
    "starlette": ("1.3.1", "CVE-2025-62727, CVE-2026-48710, PYSEC-2026-248, PYSEC-2026-249: ranges, Host, path, forms"),
    "torch": ("2.8.0", "CVE-2025-32434, CVE-2025-3730: code in checkpoints"),
    "transformers": ("4.53.0", "CVE-2025-6638, CVE-2025-6921: regular expressions without bound"),
}
NEEDED = ("h11", "starlette")
"""Packages that come with others, which permit older releases. They must be required here."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(.*)")


def problems(pyproject: str) -> Iterator[str]:
    facts = tomllib.loads(pyproject)
    project = facts["project"]
    groups = {"build-system": facts["build-system"]["requires"], "dependencies": project["dependencies"]}
    groups |= project["optional-dependencies"]
    named = set()
    for group, requirements in groups.items():
        for requirement in requirements:
            name, bound = _REQUIREMENT.findall(requirement)[0]
            named.add(name.lower())
            if name.lower() in FIXED:
                fixed, why = FIXED[name.lower()]
                least = re.search(r"(?:>=|==)\s*([0-9.]+)", bound)
                if least is None or release(least[1]) < release(fixed):
                    yield f"pyproject.toml, {group}: {name}{bound} permits releases before {fixed} ({why})"
    yield from (f"pyproject.toml: {name} is not required" for name in NEEDED if name not in named)
    for name, (fixed, why) in FIXED.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if release(installed) < release(fixed):
            yield f"{sys.prefix}: {name} {installed} is installed; {fixed} has fixes ({why})"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at the end, to compare it with others."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    assert numbers is not None, version
    parts = [int(part) for part in numbers[0].split(".")]
    while parts[-1:] == [0]:
        parts.pop()
    return tuple(parts)


if __name__ == "__main__":
    found = list(problems((Path(__file__).parents[1] / "pyproject.toml").read_text()))
    print("\n".join(found) or "no requirement permits a release with a known vulnerability")
    sys.exit(bool(found))
