"""Gateway and engines as processes of one machine."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Self

from slipstream.config import EngineConfig, GatewayConfig, HttpConfig
from slipstream.errors import ConfigError, DeadlineExceeded, LaunchFailed
from slipstream.topology.environments import home, interpreter
from slipstream.weights.transports import shm

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
WATCH_SECONDS = 0.1
ENDING_SECONDS = 5.0
MAX_FAILURES = 3
"""How often a process that ended by itself is started again."""
LOG_LINES = 30
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception): \S")


def new_run_dir() -> Path:
    """A directory of its own for each run: `$SLIPSTREAM_HOME/runs/…`, by default in the user's cache."""
    return home() / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


class ProcessGroup:
    """The processes of one run. They follow this process: if it is killed, they end by themselves."""

    def __init__(self, run_dir: Path, start_timeout: float) -> None:
        self.run_dir, self._deadline = run_dir, time.monotonic() + start_timeout
        self._start_timeout = start_timeout
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self._environments: dict[str, Mapping[str, str]] = {}
        self._marks: dict[str, Path] = {}
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.num_restarts = 0
        self._keeps = self._is_up = False
        self._failures: Counter[str] = Counter()
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)
        self._wait_for_another()
        shm.sweep()
        atexit.register(self.close)

    def _wait_for_another(self) -> None:
        """A gateway whose trainer has died is just ending. One that was killed has left its files: the next takes them up."""
        until = time.monotonic() + ENDING_SECONDS
        while (pid := _gateway_pid(self.run_dir)) is not None and shm.started(pid):
            if time.monotonic() > until:
                raise ConfigError(
                    f"{self.run_dir} belongs to another gateway (pid {pid}, by its gateway.json); choose another run directory"
                )
            time.sleep(0.05)
        if pid is not None and not (self.run_dir / "journal.sqlite").exists():
            (self.run_dir / "gateway.json").unlink(missing_ok=True)

    def start_gateway(self, config: GatewayConfig, http: HttpConfig | None = None) -> None:
        front = ["--http", str(http.port), *_overrides(http)] if http is not None else []
        self._start("gateway", ["gateway", "--run-dir", str(self.run_dir), *_options(config), *front])
        self.wait_until(lambda: _gateway_pid(self.run_dir) == self._processes["gateway"].pid, "the gateway to listen")

    def start_engine(
        self,
        name: str,
        model: Path,
        config: EngineConfig,
        patience: float,
        joins: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`joins` is the run directory of the gateway, where it is not this group's. `environment` is added to ours."""
        mark = self._marks[name] = mark_of(joins or self.run_dir, name)
        mark.unlink(missing_ok=True)
        arguments = ["engine", "--run-dir", str(joins or self.run_dir), "--model", str(model), "--name", name]
        arguments += ["--patience", f"{patience:g}"]
        self._environments[name] = environment or {}
        self._start(name, arguments + _overrides(config), interpreter(config))

    def wait_for_engines(self, count: int) -> None:
        """A registered engine leaves a mark in the run directory: no connection is needed to wait for it."""
        marks = self._marks.values()
        self.wait_until(lambda: sum(m.exists() for m in marks) >= count, f"{count} engine(s) to register")
        self._is_up = True

    def keep_alive(self) -> None:
        """From now on a process that dies is started again. An engine then has no weights, or old ones: `bridge.repair`. A
        gateway goes on under the same address, with what is in its journal."""
        self._keeps = True
        threading.Thread(target=self._watch, name="slipstream-keeper", daemon=True).start()

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_SECONDS):
            with self._lock:
                for name, process in list(self._processes.items()):
                    code = process.poll()
                    if code is not None and not self._ending.is_set() and self._may_restart(name, code):
                        self.num_restarts += 1
                        log.warning("%s ended with exit code %s; starting it again", name, code)
                        self._spawn(name)

    def _may_restart(self, name: str, code: int) -> bool:
        """One that was killed may always. One that ends by itself will do so again, unless it had worked for a while."""
        if code < 0:
            return True
        self._failures[name] += 1
        return self._is_up and self._failures[name] <= MAX_FAILURES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Engines first, so that the gateway sees them go; then whatever is left is killed. May be called twice."""
        atexit.unregister(self.close)
        self._ending.set()
        with self._lock:  # nobody starts anything any more
            processes, self._processes = list(reversed(self._processes.values())), {}
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shm.sweep()

    def _start(self, name: str, arguments: Sequence[str], python: str = sys.executable) -> None:
        self._commands[name] = [python, "-m", "slipstream.cli", *arguments, "--owner", str(os.getpid())]
        (self.run_dir / f"{name}.log").write_bytes(b"")
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        with open(self.run_dir / f"{name}.log", "ab") as output:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
            self._processes[name] = subprocess.Popen(
                self._commands[name],
                env={**os.environ, **self._environments.get(name, {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, done: Callable[[], bool], what: str, deadline: float | None = None) -> None:
        """Raises `LaunchFailed` as soon as a process has ended by itself. The deadline is that of the start, unless given."""
        deadline = self._deadline if deadline is None else deadline
        while not done():
            for name, process in list(self._processes.items()):
                code = process.poll()
                if code is not None and not (self._keeps and code < 0):  # one that was killed is started again
                    raise LaunchFailed(
                        f"{name} ended with exit code {process.returncode} while waiting for {what}; the end of "
                        f"{self.run_dir / name}.log:\n{self._log_tail(name)}"
                    )
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}.log\n{self._log_tail(name)}" for name in self._processes)
                raise DeadlineExceeded(f"waited {self._start_timeout:g} s for {what}, in {self.run_dir}:\n{tails}")
            time.sleep(0.02)

    def _log_tail(self, name: str) -> str:
        """The last lines, and before them what went wrong further up: processes of an engine's own may have said it first."""
        lines = (self.run_dir / f"{name}.log").read_text(errors="replace").splitlines()
        above, tail = lines[:-LOG_LINES], lines[-LOG_LINES:]
        causes = list(dict.fromkeys(line for line in above if _CAUSE.search(line)))[-3:]
        return "\n".join([*causes, *(["…"] if causes else []), *tail])


def mark_of(run_dir: Path, engine: str) -> Path:
    """The file that says that an engine has registered."""
    return run_dir / f"{engine}.ready"


def _gateway_pid(run_dir: Path) -> int | None:
    """Of the gateway whose file is there; 0 if the file cannot be read, None if there is none."""
    try:
        return int(json.loads((run_dir / "gateway.json").read_text())["pid"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _options(config: GatewayConfig) -> list[str]:
    """A config as command-line options: `lease_seconds=10` is `--lease-seconds 10`."""
    return [
        text
        for field in fields(config)
        for text in (f"--{field.name.replace('_', '-')}", str(getattr(config, field.name)))
    ]


def _overrides(config: EngineConfig | HttpConfig) -> list[str]:
    """`max_concurrency=64`, as TOML values."""
    return [f"{field.name}={json.dumps(getattr(config, field.name))}" for field in fields(config)]
