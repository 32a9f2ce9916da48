"""The report of a chaos run: outcomes and recovery times by fault, and broken promises."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from slipstream.chaos.injection import Injection, role_of


def table(injections: Sequence[Injection]) -> str:
    """One row per step: how often each fault was injected there, and what came of it."""
    kinds = sorted({injection.kind for injection in injections})
    rows = defaultdict(list)
    for injection in injections:
        rows[injection.step].append(injection)
    lines = ["| step | process | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for step, found in rows.items():
        cells = []
        for kind in kinds:
            counts = Counter(i.outcome for i in found if i.kind == kind)
            cells.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        lines.append(f"| {step} | {role_of(step)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def recovery(injections: Sequence[Injection]) -> str:
    """Seconds until the trainer takes its next groups, by process and fault."""
    by_fault = defaultdict(list)
    for injection in injections:
        if injection.outcome == "recovered":
            by_fault[injection.role, injection.kind.removesuffix(f" {injection.role}")].append(injection.seconds)
    lines = ["| process | fault | count | p50 | p99 |", "|---|---|---|---|---|"]
    for (process, kind), seconds in sorted(by_fault.items()):
        ordered = sorted(seconds)
        late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        lines.append(f"| {process} | {kind} | {len(seconds)} | {statistics.median(seconds):.2f} s | {late:.2f} s |")
    return "\n".join(lines)
