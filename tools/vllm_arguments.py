"""Write the table of vLLM's arguments into docs/vllm.md, from the table in the code and the results of tests in
docs/vllm_arguments.json (see tests/vllm/argument_results.py); `--check` only compares."""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from slipstream.vllm_arguments import PROMISES, RULES, ArgumentRule  # noqa: E402

BLOCK = re.compile(r"(<!-- vLLM's arguments -->\n).*?(<!-- end of vLLM's arguments -->)", flags=re.DOTALL)


def table(runs: list[dict[str, Any]]) -> str:
    lines = [f"| passes | {' | '.join(PROMISES)} | run | |", f"|---|{'---|' * len(PROMISES)}---|---|"]
    for (rule, results), names in _grouped("kept", runs) + _grouped("reported", runs):
        cells = [_cell(promise, rule, results) for promise in PROMISES]
        where = "; ".join(where for where, _ in results) or "not run here"
        lines.append(f"| {names} | {' | '.join(cells)} | {where} | {rule.reason} |")
    lines += ["", "| refused | breaks | why |", "|---|---|---|"]
    lines += [
        f"| {names} | {', '.join(rule.promises)} | {rule.reason} |" for (rule, _), names in _grouped("refused", [])
    ]
    lines += ["", "| Slipstream's to set | instead |", "|---|---|"]
    lines += [f"| {names} | {rule.reason} |" for (rule, _), names in _grouped("ours", [])]
    return "\n".join(lines) + "\n"


def _grouped(effect: str, runs: list[dict[str, Any]]) -> list[tuple[tuple[ArgumentRule, Any], str]]:
    """Arguments with the same rule and the same results, in one row."""
    rules = [(name, (rule, _results(name, runs))) for name, rule in RULES.items() if rule.effect == effect]
    first = {key: index for index, (_, key) in reversed(list(enumerate(rules)))}
    rules.sort(key=lambda entry: (not entry[1][1], first[entry[1]]))
    return [
        (key, ", ".join(f"`{name}`" for name, _ in members)) for key, members in groupby(rules, lambda entry: entry[1])
    ]


def _results(name: str, runs: list[dict[str, Any]]) -> tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]:
    """Where an argument ran, and which promises its tests found held."""
    found = (run for run in runs if name in run["arguments"])
    return tuple((f"{run['on']}, {run['vllm']}", tuple(sorted(run["held"].items()))) for run in found)


def _cell(promise: str, rule: ArgumentRule, results: Any) -> str:
    outcomes = {dict(held)[promise] for _, held in results if promise in dict(held)}
    if not outcomes:
        return "not held" if promise in rule.promises else "?"
    return "held" if outcomes == {True} else "not held"


def main() -> None:
    page, runs = ROOT / "docs" / "vllm.md", json.loads((ROOT / "docs" / "vllm_arguments.json").read_text())
    for run in runs:
        for name in run["arguments"]:
            rule = RULES.get(name)
            if rule is None:
                sys.exit(
                    f"docs/vllm_arguments.json has results for {name}, which slipstream/vllm_arguments.py does not know"
                )
            lost = {promise for promise, held in run["held"].items() if not held}
            expected = {promise for other in run["arguments"] if other in RULES for promise in RULES[other].promises}
            if lost - expected:
                sys.exit(
                    f"{name}: tests on {run['on']} found {', '.join(sorted(lost - expected))} not held, the code says it is"
                )
    text = page.read_text()
    fresh = BLOCK.sub(lambda match: match[1] + table(runs) + match[2], text)
    if fresh == text:
        return
    if "--check" in sys.argv:
        sys.exit("docs/vllm.md: the table of vLLM's arguments is out of date; run tools/vllm_arguments.py")
    page.write_text(fresh)


if __name__ == "__main__":
    main()
