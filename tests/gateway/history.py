"""Checks that the history of a rollout journal is consistent."""

from __future__ import annotations

from slipstream.gateway.journal import Journal


def events(journal: Journal) -> list[tuple[str, int, int, int, int]]:
    """Return `(kind, group, sample or position, attempt, version)` in order."""
    return journal._db.execute("SELECT kind, number, sample, attempt, version FROM events ORDER BY at").fetchall()


def states(journal: Journal) -> dict[int, tuple[str, int]]:
    """Return `(state, number of samples)` by group."""
    rows = journal._db.execute("SELECT number, state, num_samples FROM groups")
    return {number: (state, num_samples) for number, state, num_samples in rows}


def check(journal: Journal, max_staleness: int | None = None) -> list[str]:
    """Return what is wrong with a run's history; empty if it is consistent.

    Every accepted group is taken at most once. A taken group has every sample once, all from its last attempt. Positions are
    consecutive. No group was older than `max_staleness` when it was taken."""
    problems: list[str] = []
    accepted: set[int] = set()
    attempts: dict[int, int] = {}
    samples: dict[int, dict[int, int]] = {}
    """By group: the version of each sample of the present attempt."""
    failed: set[int] = set()
    taken: dict[int, int] = {}
    serving = -1
    base, now = int(journal.fact("base") or 0), states(journal)
    for kind, number, sample, attempt, version in events(journal):
        match kind:
            case "accept":
                if number in accepted:
                    problems.append(f"group {number} was accepted twice")
                accepted.add(number)
                attempts[number], samples[number] = 0, {}
            case "renew":
                if number in taken:
                    problems.append(f"group {number} was renewed after it was taken at position {taken[number]}")
                attempts[number], samples[number] = attempt, {}
            case "sample":
                if attempt != attempts.get(number):
                    problems.append(
                        f"group {number}: a sample of attempt {attempt} came during attempt {attempts.get(number)}"
                    )
                if sample in samples.setdefault(number, {}):
                    problems.append(f"group {number}: sample {sample} came twice in attempt {attempt}")
                samples[number][sample] = version
            case "fail":
                failed.add(number)
            case "take":
                if number in taken:
                    problems.append(f"group {number} was taken twice, at positions {taken[number]} and {sample}")
                if sample != base + len(taken) + 1:
                    problems.append(f"position {sample} was assigned after position {base + len(taken)}")
                taken[number] = sample
                num_samples = now[number][1]
                present = sorted(samples.get(number, {}))
                if number not in failed and present != list(range(num_samples)):
                    problems.append(f"group {number} was taken with samples {present} of {num_samples}")
                oldest = min(samples.get(number, {}).values(), default=version)
                if max_staleness is not None and version - oldest > max_staleness:
                    problems.append(
                        f"group {number} was taken at version {version} with tokens of version {oldest}: older than "
                        f"{max_staleness}"
                    )
            case "sync":
                if version < serving:
                    problems.append(f"the fleet went back from version {serving} to {version}")
                serving = version
    for number, (state, _) in now.items():
        if number not in accepted:
            problems.append(f"group {number} was never accepted")
        if (state == "taken") != (number in taken):
            problems.append(f"group {number} is {state}, which contradicts its history")
    return problems
