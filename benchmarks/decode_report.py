"""Report of `decode.py`: ratios compared with targets, tables, and result files. Does not import JAX."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from decode_job import Case
from rich.console import Console, Group
from rich.table import Table

HF_TARGET = 1.5
"""Minimum ratio of the embedded engine's tokens per second to those of `transformers`."""
PREFILL_TARGET = 1 / 6
"""Maximum ratio of prompt tokens computed with the prefix cache to those without, for groups of 8."""

OURS, NO_CACHE, DETERMINISTIC, VLLM, HF = "ours", "ours, no prefix cache", "ours, deterministic", "vLLM", "transformers"
LOOKUP, DRAFT = ", prompt lookup", ", draft model"
"""What `OURS` and `VLLM` are followed by with speculation."""
GATEWAY = "vLLM through the gateway"
GATEWAY_TARGET = 0.97
"""Minimum ratio of tokens per second through the gateway to those of vLLM called directly."""


def describe(case: Case) -> dict[str, Any]:
    return {
        "prompts": len(case.prompt_lengths),
        "group": case.group,
        "prompt_tokens": statistics.mean(case.prompt_lengths),
        "temperature": case.temperature,
        "num_tokens": case.num_tokens,
        "mean_length": statistics.mean(case.lengths),
        "longest": max(case.lengths),
    }


def tokens_per_second(sides: dict[str, Any], side: str, case: Case) -> float:
    return case.num_tokens / statistics.median(sides[side]["cases"][case.name]["seconds"])


def targets(all_sides: dict[str, Any], cases: list[Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def at_least(name: str, measured: float, target: float | None) -> None:
        found[name] = {"measured": measured, "at_least": target, "passed": target is None or measured >= target}

    for case in cases:
        sides = {name: side for name, side in all_sides.items() if case.name in side["cases"]}
        if HF in sides and OURS in sides:
            ratio = tokens_per_second(sides, OURS, case) / tokens_per_second(sides, HF, case)
            at_least(f"{case.name}: ours over transformers", ratio, HF_TARGET)
        for kind in ("", LOOKUP, DRAFT):
            if VLLM + kind in sides and OURS + kind in sides:
                ratio = tokens_per_second(sides, OURS + kind, case) / tokens_per_second(sides, VLLM + kind, case)
                at_least(f"{case.name}: ours over vLLM{kind}", ratio, None if kind else case.goal)
            for name in (OURS, VLLM):
                if kind and name in sides and name + kind in sides:
                    ratio = tokens_per_second(sides, name + kind, case) / tokens_per_second(sides, name, case)
                    at_least(f"{case.name}: {name}{kind} over {name} without speculation", ratio, None)
        if VLLM in sides and GATEWAY in sides:
            ratio = tokens_per_second(sides, GATEWAY, case) / tokens_per_second(sides, VLLM, case)
            at_least(f"{case.name}: vLLM through the gateway over vLLM", ratio, GATEWAY_TARGET)
        if DETERMINISTIC in sides:
            ratio = tokens_per_second(sides, DETERMINISTIC, case) / tokens_per_second(sides, OURS, case)
            at_least(f"{case.name}: deterministic over not", ratio, None)
        if OURS in sides and NO_CACHE in sides and case.group > 1:
            ratio = prefill_tokens(sides, OURS, case) / prefill_tokens(sides, NO_CACHE, case)
            name = f"{case.name}: prompt tokens computed, with prefix cache over without"
            found[name] = {"measured": ratio, "at_most": PREFILL_TARGET, "passed": ratio <= PREFILL_TARGET}
        for name, side in sides.items():
            stats = side["cases"][case.name]["stats"]
            if drafted := stats.get("drafted_tokens"):
                accepted = stats["accepted_tokens"] / drafted
                at_least(f"{case.name}: {name}: accepted of {drafted:,} draft tokens (last round)", accepted, None)
        means = [side["cases"][case.name]["mean_logprob"] for side in sides.values()]
        means = [mean for mean in means if mean is not None]
        if len(means) > 1:
            spread = max(means) - min(means)
            noise = max(0.05, 3 / math.sqrt(case.num_tokens))  # bound on sampling noise for sides with the same model
            name = f"{case.name}: spread of the sides' mean logprobs"
            found[name] = {"measured": spread, "at_most": noise, "passed": spread <= noise}
    return found


def prefill_tokens(sides: dict[str, Any], side: str, case: Case) -> int:
    return sides[side]["cases"][case.name]["stats"]["prefill_tokens"]


def report(results: dict[str, Any]) -> Group:
    parts: list[Any] = [speeds(results, name) for name in results["cases"]]
    parts += [spent for name in results["cases"] if (spent := where_the_time_goes(results, name))]
    parts.append(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    for name, goal in results["targets"].items():
        bound = f"at least {goal['at_least']:g}" if goal.get("at_least") else ""
        bound = f"at most {goal['at_most']:.3g}" if "at_most" in goal else bound
        verdict = ("PASS" if goal["passed"] else "FAIL") if bound else "    "
        parts.append(f"{verdict}  {name}: {goal['measured']:.3f}" + (f" (target {bound})" if bound else ""))
    parts += [f"FAIL  {name} did not run" for name in results["failed"]]
    return Group(*parts)


def speeds(results: dict[str, Any], case: str) -> Table:
    about, model = results["cases"][case], results["model"]
    title = (
        f"{case}: {about['prompts']} prompts × {about['group']} samples, {about['prompt_tokens']:.0f} + "
        f"{about['mean_length']:.0f} tokens (longest {about['longest']}, {about['num_tokens']:,} in all); "
        f"{model['parameters'] / 1e6:,.0f}M, {model['dtype']}"
    )
    heads = ("tokens/s", "seconds", "lowest–highest", "warm-up", "start", "mean logprob", "others busy")
    table = Table("", *heads, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, side in results["sides"].items():
        if case not in side["cases"]:
            continue
        found = side["cases"][case]
        seconds = found["seconds"]
        median = statistics.median(seconds)
        table.add_row(
            name,
            f"{about['num_tokens'] / median:,.0f}",
            f"{median:.2f}",
            f"{min(seconds):.2f}–{max(seconds):.2f}",
            f"{found['warmup_seconds']:.1f} s",
            f"{side['start_seconds']:.1f} s",
            "" if found["mean_logprob"] is None else f"{found['mean_logprob']:.3f}",
            f"{side['others_busy']:.0%}",
        )
    return table


def where_the_time_goes(results: dict[str, Any], case: str) -> Table | None:
    """Return the engine's statistics of the last round: seconds by phase with their shares, then the others."""
    sides = {name: side for name, side in results["sides"].items() if side["cases"].get(case, {}).get("stats")}
    if not sides:
        return None
    table = Table("", *sides, title=f"{case}: where the time goes (last round)")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, dict[str, str]] = {}
    for name, side in sides.items():
        found = side["cases"][case]
        total = found["seconds"][-1]
        stats = dict(found["stats"])
        spent = stats.pop("seconds", {})
        rest = {"rest": total - sum(spent.values())} if spent else {}  # vLLM tells no phases
        for phase, seconds in {**spent, **rest}.items():
            rows.setdefault(phase, {})[name] = f"{seconds:.2f} s  {seconds / total:5.1%}"
        for key, value in stats.items():
            rows.setdefault(key.replace("_", " "), {})[name] = f"{value:,}" if isinstance(value, int) else str(value)
    for label, cells in rows.items():
        table.add_row(label, *(cells.get(name, "") for name in sides))
    return table


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    plain = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    plain.print(report(results))
    lines = "\n".join(line.rstrip() for line in plain.export_text().splitlines())
    workload = "" if results["workload"] == "rollouts" else f" --workload {results['workload']}"
    path.with_suffix(".md").write_text(
        f"Output of `python benchmarks/decode.py --{results['device']}{workload}`:\n\n```\n{lines}\n```\n"
    )
