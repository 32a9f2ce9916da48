"""Runs `slipstream train` and injects faults into its processes, one after the other; restarts the trainer when it dies.

A fault is armed at a named step (`runtime/failpoints.py`), or comes from outside to whichever process has a role at the
moment. A fault has recovered when the trainer takes its next groups."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.chaos.checker import check
from slipstream.chaos.history import Event, HistoryReader, read_history
from slipstream.chaos.leftovers import leftovers, num_fds
from slipstream.errors import LaunchFailed
from slipstream.runtime.failpoints import STEPS, VARIABLE

ROLES = ("engine", "gateway", "trainer")
AT_ANY_TIME = tuple(f"any.{role}" for role in ROLES)
"""Pseudo steps: the fault comes from outside, at a random time."""
BASIC = ("kill", "freeze", "delay", "error")
ANYWHERE = (*BASIC, "clock jump", "partition", *(f"kill {role}" for role in ROLES))
OUTSIDE = ("kill", "freeze", "long freeze", "slow", "out of memory")
WRITES = ("gateway.committed", "gateway.accept", "gateway.start", "gateway.finish", "gateway.take", "train.save")
"""Steps before a write to disk."""
AT_START = ("launch.gateway", "launch.engine", "launch.register", "engine.allocate")
"""Steps that only a process that has just started reaches."""
FREEZE_SECONDS, LONG_FREEZE_SECONDS = 2.0, 13.0
"""The second is longer than an engine's lease."""
MAX_NEW_FDS = 64
"""File descriptors that a process may gain in a run."""
ARM_SECONDS = RECOVERY_SECONDS = 300.0
"""How long a fault waits for a process to reach its step, and then for the next groups. Long, for machines that are busy."""
POLL_SECONDS = 0.05
MAX_FAILURES = 4
"""How often the trainer may fail without taking a group in between."""


@dataclass(frozen=True, slots=True)
class Injection:
    step: str
    kind: str
    outcome: str = ""
    """`recovered`, `not reached`, or `stuck`."""
    seconds: float = 0.0
    """From the fault to the next groups that the trainer took."""

    @property
    def role(self) -> str:
        """The process that fails."""
        named = self.kind.partition(" ")[2]
        return named if named in ROLES else role_of(self.step)


def exhaustive() -> list[Injection]:
    """Every fault at every step."""
    return [Injection(step, kind) for step in STEPS.split() for kind in (*BASIC, *_special(step))]


def drawn(count: int, seed: int) -> list[Injection]:
    """Draw faults. The same seed draws the same ones."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        step = rng.choice((*STEPS.split(), *AT_ANY_TIME * 3))
        kinds = OUTSIDE if step in AT_ANY_TIME else (*ANYWHERE, *_special(step) * 3)
        found.append(Injection(step, rng.choice(kinds)))
    return found


def _special(step: str) -> tuple[str, ...]:
    """Return the faults that only this step can have."""
    if step in WRITES:
        return ("disk full",)
    return {"engine.allocate": ("shm full",), "engine.verify": ("corrupt",)}.get(step, ())


def role_of(step: str) -> str:
    """Return which process reaches a step."""
    scope, _, name = step.partition(".")
    if scope == "any":
        return name
    if scope in ("engine", "gateway"):
        return scope
    return {"launch.gateway": "gateway", "launch.engine": "engine", "launch.register": "engine"}.get(step, "trainer")


class ChaosRun:
    """One training run under faults. Its directory keeps the run, the log of the trainer, and the history."""

    def __init__(self, config: Path, directory: Path, seed: int, overrides: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", "slipstream.cli", "train", str(config.resolve()), *overrides]
        self._command.append(f"run_dir={directory / 'run'}")
        self.directory, self._rng = directory, random.Random(seed)
        self._log = directory / "train.log"
        self._armed = directory / "armed"
        self._armed.mkdir(parents=True, exist_ok=True)
        self._reader = HistoryReader(directory)
        self._pids: dict[str, int] = {}
        self._frozen: dict[int, float] = {}
        """By pid: when it continues."""
        self._fds: dict[int, list[int]] = defaultdict(list)
        """By pid: file descriptors after each fault."""
        self.restarts = self._failures = 0
        self._is_over = False
        self._trainer = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            environment = os.environ | {VARIABLE: str(self.directory)}
            return subprocess.Popen(self._command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def run(
        self,
        injections: Sequence[Injection],
        show: Callable[[Injection], None],
        until: float = float("inf"),
        pause: float = 0.0,
    ) -> list[Injection]:
        """Inject the faults, each `pause` seconds after the last one has recovered, as many as the run lasts for and no more
        after `until`. Returns those that were injected."""
        done: list[Injection] = []
        self._wait_for_groups(time.monotonic(), RECOVERY_SECONDS)
        for injection in injections:
            for _ in self._events(time.monotonic() + pause):
                pass
            if self._is_over or time.monotonic() > until:
                break
            result = self._inject(injection)
            if self._is_over and result.outcome != "recovered":
                break
            done.append(result)
            show(result)
            if result.outcome == "stuck":
                break
        return done

    def finish(self, deadline: float) -> bool:
        """Wait for the end of the run. Returns whether it ended well."""
        while not self._is_over and time.monotonic() < deadline:
            self._poll()
        return self._is_over

    def close(self) -> None:
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._trainer.kill()
        self._trainer.wait()

    def problems(self, max_staleness: int) -> list[str]:
        """Return the promises that were broken and what the run has left behind. Call it after `close`."""
        history = read_history(self.directory)
        leaks = [
            f"process {pid} had {counts[0]} open file descriptors after a fault, and {counts[-1]} later"
            for pid, counts in self._fds.items()
            if counts[-1] - counts[0] > MAX_NEW_FDS
        ]
        return [*check(history, max_staleness), *leaks, *leftovers(self.directory, {event.pid for event in history})]

    def _inject(self, injection: Injection) -> Injection:
        started = self._disturb(injection) if injection.step in AT_ANY_TIME else self._arm(injection)
        if started is None:
            return replace(injection, outcome="not reached")
        recovered = self._wait_for_groups(started, RECOVERY_SECONDS)
        for pid in self._pids.values():
            if count := num_fds(pid):
                self._fds[pid].append(count)
        outcome = "recovered" if recovered is not None or self._is_over else "stuck"
        return replace(injection, outcome=outcome, seconds=(recovered or time.monotonic()) - started)

    def _arm(self, injection: Injection) -> float | None:
        """Arm a fault and wait until it has happened; returns when that was."""
        path, begun = self._armed / injection.step, time.monotonic()
        kind, _, role = injection.kind.partition(" ")
        temporary = self._armed / "new"
        temporary.write_text(f"kill {self._pids[role]}" if role in self._pids else injection.kind)
        temporary.rename(path)
        if injection.step in AT_START:
            _signal(self._pids.get(role_of(injection.step), 0), signal.SIGKILL)
        for event in self._events(begun + ARM_SECONDS):
            if event.is_fault and event.step == injection.step and event.at >= begun:
                if kind == "freeze":
                    self._frozen[event.pid] = event.at + FREEZE_SECONDS
                return event.at
        path.unlink(missing_ok=True)
        return None

    def _disturb(self, injection: Injection) -> float | None:
        """Disturb a process from outside at a random time; returns when that was."""
        until = time.monotonic() + self._rng.uniform(0.0, 2.0)
        for _ in self._events(until):
            pass
        pid, now = self._pids.get(injection.step.partition(".")[2], 0), time.monotonic()
        match injection.kind:
            case "kill":
                sent = _signal(pid, signal.SIGKILL)
            case "freeze" | "long freeze":
                sent = _signal(pid, signal.SIGSTOP)
                self._frozen[pid] = now + (FREEZE_SECONDS if injection.kind == "freeze" else LONG_FREEZE_SECONDS)
            case "out of memory":
                sent = self._limit_memory(pid, now + FREEZE_SECONDS)
            case _:  # slow: a tenth of its time
                sent = self._slow(pid, now + FREEZE_SECONDS)
        return now if sent else None

    def _limit_memory(self, pid: int, until: float) -> bool:
        """Let all allocations of a process fail that need more memory from the kernel, for a while."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            before = resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
        except (OSError, ValueError):
            return False
        while time.monotonic() < until:
            self._poll()
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)
        return True

    def _slow(self, pid: int, until: float) -> bool:
        sent = True
        while sent and time.monotonic() < until:
            sent = _signal(pid, signal.SIGSTOP)
            time.sleep(0.09)
            sent = _signal(pid, signal.SIGCONT) and sent
            time.sleep(0.01)
        return sent

    def _wait_for_groups(self, since: float, seconds: float) -> float | None:
        """Wait until the trainer takes groups; returns when it did."""
        for event in self._events(since + seconds):
            if event.step == "rollout.taken" and event.at > since:
                return event.at
        return None

    def _events(self, until: float) -> Iterator[Event]:
        while not self._is_over and time.monotonic() < until:
            yield from self._poll()

    def _poll(self) -> list[Event]:
        time.sleep(POLL_SECONDS)
        events = self._reader.new()
        for event in events:
            self._pids[role_of(event.step)] = event.pid
            if event.step == "rollout.taken":
                self._failures = 0
        for pid, until in list(self._frozen.items()):
            if time.monotonic() > until:
                _signal(pid, signal.SIGCONT)
                del self._frozen[pid]
        code = self._trainer.poll()
        if code == 0:
            self._is_over = True
        elif code is not None:
            self.restarts += 1
            self._failures += 1
            if self._failures > MAX_FAILURES:
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
                raise LaunchFailed(
                    f"the trainer failed {self._failures} times in a row; {self._log} ends with:\n{tail}"
                )
            self._trainer = self._start()
        return events


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        if pid > 0:
            os.kill(pid, number)
            return True
    return False
