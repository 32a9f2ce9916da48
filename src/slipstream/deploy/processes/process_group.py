"""Start, watch and stop a gateway and engines as processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from slipstream.config import EngineConfig, GatewayConfig, HttpConfig
from slipstream.deploy.processes.vllm_environment import interpreter
from slipstream.errors import ConfigError, DeadlineExceeded, LaunchFailed
from slipstream.gateway.server import check_port
from slipstream.runtime.log_lines import last_message
from slipstream.runtime.private_files import private_directory, private_file
from slipstream.runtime.process_times import process_start_time
from slipstream.runtime.waiting import waiting_for
from slipstream.weights.transports.host import shm

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
WATCH_SECONDS = 0.1
ENDING_SECONDS = 5.0
MAX_FAILURES = 3
"""How often in a row a process that exited with an error is restarted."""
STEADY_SECONDS = 30.0
"""A process that has run for this long has started well; its earlier failures do not count."""
LOG_LINES = 30
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception): \S")


class ProcessGroup:
    """The processes of one run. They exit when this process does, even if it is killed (`lifeline.py`)."""

    def __init__(self, run_dir: Path, start_timeout: float) -> None:
        self.run_dir, self._deadline = run_dir, time.monotonic() + start_timeout
        self._start_timeout = start_timeout
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self._ready_files: dict[str, Path] = {}
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._restarts = self._is_up = False
        self._failures: Counter[str] = Counter()
        self._spawned_at: dict[str, float] = {}
        private_directory(run_dir, "the run directory")
        self._wait_for_earlier_gateway()
        shm.sweep()
        atexit.register(self.close)

    def _wait_for_earlier_gateway(self) -> None:
        """Wait for an earlier gateway in this directory to exit. One whose owner has died would too, but that takes time, or
        for ever if it hangs: it is killed, and leaves its files, which the next one continues with."""
        until = time.monotonic() + ENDING_SECONDS
        while (pid := _gateway_pid(self.run_dir)) is not None and process_start_time(pid):
            if _is_orphan(self.run_dir):
                log.warning("killing the gateway of an earlier run (pid %d): its owner is gone", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            elif time.monotonic() > until:
                raise ConfigError(
                    f"{self.run_dir} is in use by another gateway (pid {pid}, from gateway.json); choose another run directory"
                )
            time.sleep(0.05)
        if pid is not None and not (self.run_dir / "journal.sqlite").exists():
            (self.run_dir / "gateway.json").unlink(missing_ok=True)

    def start_gateway(self, config: GatewayConfig, http: HttpConfig | None = None) -> None:
        for what, server in (("gateway", config), ("http", http)):
            if server is not None:
                check_port(what, server.host, server.port)
        front = ["--http", str(http.port), *_overrides(http)] if http is not None else []
        self._start("gateway", ["gateway", "--run-dir", str(self.run_dir), *_options(config), *front])

    def wait_for_gateway(self) -> None:
        with waiting_for("the gateway to listen", lambda: f"its log is {self.run_dir / 'gateway.log'}"):
            self.wait_until(
                lambda: _gateway_pid(self.run_dir) == self._processes["gateway"].pid, "the gateway to listen"
            )

    def start_engine(
        self,
        name: str,
        model: str | Path,
        config: EngineConfig,
        patience: float,
        joins: Path | None = None,
    ) -> None:
        """Start an engine, which waits for this group's gateway, or joins the one of the run directory `joins`."""
        ready = self._ready_files[name] = ready_file(joins or self.run_dir, name)
        ready.unlink(missing_ok=True)
        arguments = ["engine", "--run-dir", str(joins or self.run_dir), "--model", str(model), "--name", name]
        arguments += ["--patience", f"{patience:g}", *([] if joins else ["--beside-gateway"])]
        self._start(name, arguments + _overrides(config), interpreter(config))

    def wait_for_engines(self, count: int) -> None:
        """Wait until engines have registered. Each then touches a file in the run directory, so this needs no connection."""
        files, what = self._ready_files.values(), f"{count} engine(s) to register"
        with waiting_for(what, self._why_not_ready):
            self.wait_until(lambda: sum(file.exists() for file in files) >= count, what)
        self._is_up = True

    def _why_not_ready(self) -> str:
        """Return the last log line of an engine that has not registered, and where the logs are."""
        late = [name for name, file in self._ready_files.items() if not file.exists()]
        said = next((f"{name}: {line}" for name in late if (line := last_message(self.run_dir / f"{name}.log"))), "")
        return f"{said or ', '.join(late)} (logs: {self.run_dir})"

    def keep_alive(self) -> None:
        """Restart processes that die from now on. A restarted engine has no weights or old ones; `bridge.repair` fixes that. A
        restarted gateway keeps its address and its journal."""
        self._restarts = True
        threading.Thread(target=self._watch, name="slipstream-keeper", daemon=True).start()

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_SECONDS):
            with self._lock:
                for name, process in list(self._processes.items()):
                    code = process.poll()
                    if code is not None and not self._ending.is_set() and self._may_restart(name, code):
                        log.warning(
                            "%s exited with code %s; restarting it. Its log is %s",
                            name,
                            code,
                            self.run_dir / f"{name}.log",
                        )
                        self._spawn(name)

    def _may_restart(self, name: str, code: int) -> bool:
        """Return whether to restart a process. One that was killed always; one that exited by itself only a few times in a row,
        and only once the fleet has been up: before that it would fail again."""
        if code < 0:
            return True
        if time.monotonic() - self._spawned_at[name] > STEADY_SECONDS:
            self._failures[name] = 0
        self._failures[name] += 1
        return self._is_up and self._failures[name] <= MAX_FAILURES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes, engines first so that the gateway sees them leave. Kill those that do not stop. Idempotent."""
        atexit.unregister(self.close)
        self._ending.set()
        with self._lock:  # no more restarts
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
        private_file(log_file := self.run_dir / f"{name}.log")
        os.truncate(log_file, 0)
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        self._spawned_at[name] = time.monotonic()
        with open(self.run_dir / f"{name}.log", "ab") as output:
            # A new session: Ctrl-C reaches only this process, which then stops the others in order.
            self._processes[name] = subprocess.Popen(
                self._commands[name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, done: Callable[[], bool], what: str, deadline: float | None = None) -> None:
        """Wait for a condition. Raise `LaunchFailed` as soon as a process has exited. The default deadline is that of the
        start."""
        deadline = self._deadline if deadline is None else deadline
        while not done():
            for name, process in list(self._processes.items()):
                code = process.poll()
                if code is not None and not (self._restarts and code < 0):  # a killed process is restarted
                    raise LaunchFailed(
                        f"{name} exited with code {process.returncode} while waiting for {what}; all logs are in "
                        f"{self.run_dir}, and {name}.log ends with:\n{self._log_tail(name)}"
                    )
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}.log\n{self._log_tail(name)}" for name in self._processes)
                raise DeadlineExceeded(
                    f"waited {self._start_timeout:g} s for {what}; all logs are in {self.run_dir} and end with:\n{tails}"
                )
            time.sleep(0.02)

    def _log_tail(self, name: str) -> str:
        """Return the last lines of a log, preceded by earlier exceptions: child processes of an engine may have failed
        first."""
        lines = (self.run_dir / f"{name}.log").read_text(errors="replace").splitlines()
        above, tail = lines[:-LOG_LINES], lines[-LOG_LINES:]
        causes = list(dict.fromkeys(line for line in above if _CAUSE.search(line)))[-3:]
        return "\n".join([*causes, *(["…"] if causes else []), *tail])


def ready_file(run_dir: Path, engine: str) -> Path:
    """Return the file that an engine touches once it has registered."""
    return run_dir / f"{engine}.ready"


def _gateway_pid(run_dir: Path) -> int | None:
    """Return the pid in gateway.json; 0 if the file cannot be read, None if there is none."""
    try:
        return int(_gateway_facts(run_dir)["pid"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def running_gateway(run_dir: Path) -> int:
    """Return the pid of the gateway that is running in this directory; 0 if there is none."""
    pid = _gateway_pid(run_dir)
    return pid if pid and process_start_time(pid) else 0


def _gateway_facts(run_dir: Path) -> Any:
    return json.loads((run_dir / "gateway.json").read_text())


def _is_orphan(run_dir: Path) -> bool:
    """Whether the gateway of this directory was started by a process that is gone."""
    try:
        facts = _gateway_facts(run_dir)
        pid, owner = int(facts["pid"]), int(facts["owner"])
        is_same = process_start_time(pid) == facts["started"]  # and not a later process with its pid
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    return bool(owner) and is_same and parent != owner


def _options(config: GatewayConfig) -> list[str]:
    """Return a config as command-line options: `lease_seconds=10` is `--lease-seconds 10`."""
    flags = {name: f"--{name.replace('_', '-')}" for name, _ in config}
    settings = [text for name, value in config if not isinstance(value, bool) for text in (flags[name], str(value))]
    return [*settings, *(flags[name] for name, value in config if value is True)]


def _overrides(config: EngineConfig | HttpConfig) -> list[str]:
    """Return a config as overrides with TOML values, such as `max_num_seqs=64`."""
    return [f"{name}={json.dumps(value)}" for name, value in config.model_dump(exclude_none=True).items()]
