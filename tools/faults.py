"""Plant faults in the source, one at a time, and say which test catches each.

    python tools/faults.py                 # all of tools/faults.toml
    python tools/faults.py --only plan     # those whose name contains "plan"
    python tools/faults.py --list

Each fault is one small edit of a copy of the repository; the tests named beside it run there until the first failure. A
fault that no test catches, or whose place is gone from the source, makes the exit code 1."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Fault:
    name: str
    path: str
    """Module under src/slipstream."""
    old: str
    """Text that occurs exactly once in it."""
    new: str
    tests: str
    """Arguments for pytest: where the fault should be caught."""


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    caught_by: str
    seconds: float
    problem: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time")
    parser.add_argument("--list", action="store_true", help="print the faults and check that their places exist")
    options = parser.parse_args()
    rows = tomllib.loads((ROOT / "tools/faults.toml").read_text())["fault"]
    faults = [fault for row in rows if options.only in (fault := Fault(**row)).name]
    misplaced = [problem for fault in faults if (problem := place_of(fault))]
    if misplaced:
        sys.exit("\n".join(misplaced))
    if options.list:
        print("\n".join(f"{f.name:40} {f.path}" for f in faults))
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as cache, ThreadPoolExecutor(options.jobs) as pool:
        verdicts = []
        for verdict in pool.map(lambda fault: attempt(fault, Path(cache)), faults):
            verdicts.append(verdict)
            found = verdict.caught_by or f"NOT CAUGHT {verdict.problem}"
            print(f"{verdict.fault.name:40} {verdict.seconds:5.0f} s  {found}", flush=True)
    caught = sum(bool(verdict.caught_by) for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} faults caught")
    sys.exit(caught < len(verdicts))


def place_of(fault: Fault) -> str:
    """What is wrong with a fault's place; empty if it occurs exactly once."""
    count = (ROOT / "src/slipstream" / fault.path).read_text().count(fault.old)
    return "" if count == 1 else f"{fault.name}: its text occurs {count} times in {fault.path}, not once"


def attempt(fault: Fault, cache: Path) -> Verdict:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-fault-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "tools"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (
            "docs",
            "benchmarks",
            "examples",
            "pyproject.toml",
            "README.md",
            "CONTRIBUTING.md",
            "Makefile",
            ".venv-vllm",
        ):
            if (ROOT / name).exists():
                (copy / name).symlink_to(ROOT / name)
        module = copy / "src/slipstream" / fault.path
        module.write_text(module.read_text().replace(fault.old, fault.new))
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *fault.tests.split()]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return Verdict(fault, "", time.monotonic() - started, f"(no end within {TIMEOUT_SECONDS} s)")
    seconds = time.monotonic() - started
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode == 1 and found:
        return Verdict(fault, found[1], seconds)
    tail = " ".join(done.stdout.splitlines()[-1:])
    return Verdict(fault, "", seconds, f"(pytest exit {done.returncode}: {tail})")


if __name__ == "__main__":
    main()
