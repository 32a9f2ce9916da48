"""A worker process: Python code of the user, isolated from the trainer. The trainer's side; `worker.py` is the process.

Messages are JSON lines over two pipes; nothing is pickled (docs/decisions/0019-reward-workers.md). A worker leads a process
group, so that processes started by its code are killed with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slipstream
from slipstream.errors import ConfigError, DeadlineExceeded, RequestError

MAX_LINE = 8 << 20
MAX_OUTPUT = 4000
EXIT_SECONDS = 5.0

_PROGRAM = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = sys.path + a['path'] if a['python'] else a['path']; "
    "from {module} import main; main(a)"
)


class WorkerProcess:
    """Started when needed, and again after it was killed. Not thread-safe: use it on one event loop."""

    def __init__(
        self, module: str, subject: str, settings: Mapping[str, Any], start_timeout: float, python: str = ""
    ) -> None:
        """`main(settings)` of `module` serves the messages. `subject` names its code in errors: `reward 'my_rewards:exact'`.
        `python` is another interpreter, which has the modules of its own environment and this package."""
        self._module, self._subject, self._settings = module, subject, settings
        self._start_timeout, self._python = start_timeout, python
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False
        self._output = bytearray()
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. `ConfigError` if it cannot import the code, `DeadlineExceeded` if that takes too long."""
        if self._closed:
            raise RequestError(f"the worker of {self._subject} is closed; create another")
        own = [path or str(Path.cwd()) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
        own.append(str(Path(slipstream.__file__).parents[1]))
        path = own if self._python else sys.path
        settings = {**self._settings, "path": path, "python": self._python, "owner": os.getpid()}
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(self._python or sys.executable, "-c", _PROGRAM.format(module=self._module), json.dumps(settings)),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=MAX_LINE,
                start_new_session=True,
                # Code that imports JAX must not reserve the trainer's GPU memory.
                # Processes that the code starts find the same modules of the user.
                env={
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(dict.fromkeys(own)),
                },
            )
        except OSError as error:
            raise ConfigError(f"{self._subject}: its worker process cannot be started: {error}") from None
        self._output.clear()
        self._reading = asyncio.create_task(self._read_output(process))
        try:
            message = await asyncio.wait_for(self._receive(process), self._start_timeout)
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded(
                f"a worker process did not import {self._subject} within {self._start_timeout:g} s; does its module do work "
                f"when imported? Its output:\n{self._output_tail()}"
            ) from None
        except BaseException:
            await self.kill()
            raise
        if "ready" not in message:
            ended = await self.kill(patience=1.0)
            raise ConfigError(
                message.get("refused")
                or f"{self._subject}: its worker process {ended} while importing it:\n{self._output_tail()}"
            )

    async def kill(self, patience: float = 0.0) -> str:
        """Kill the process group and return how the process ended. A dying process gets `patience` seconds to exit first, so
        that its own exit status is seen. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return "was not running"
        try:
            if patience:
                await _wait(process, patience)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await _wait(process, EXIT_SECONDS)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=0.2)
            self._reading.cancel()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()  # a child of the process may hold the descriptors open
        return _ended(process.returncode)

    async def close(self) -> None:
        self._closed = True
        await self.kill()

    async def _send(self, process: asyncio.subprocess.Process, line: bytes) -> bool:
        """Send a message. False if the process is gone."""
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def _receive(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """The process's next message; empty at the end of the stream."""
        assert process.stdout is not None
        try:
            message = json.loads(await process.stdout.readline() or b"{}")
        except (ValueError, RecursionError):
            message = None
        except ConnectionResetError:
            return {}
        return message if isinstance(message, dict) else {"invalid": True}

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            self._output += chunk
            del self._output[:-MAX_OUTPUT]

    def _output_tail(self) -> str:
        return self._output.decode(errors="replace").strip()


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


def _ended(code: int | None) -> str:
    if code is None:
        return "could not be killed"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
