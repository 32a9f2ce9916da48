"""Short-lived processes with the same imports: each is a fork of one process, made before JAX has started in it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType

_PARENT = """
import importlib, json, os, sys, traceback
modules, script = sys.argv[1:]
for module in modules.split():
    importlib.import_module(module)
for line in sys.stdin:
    sys.argv[1:] = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            exec(script, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """`modules` are imported once, `script` runs in every process, with arguments of its own in `sys.argv`."""

    def __init__(self, modules: str, script: str) -> None:
        command = [sys.executable, "-c", _PARENT, modules, script]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: object) -> tuple[int, str]:
        """Run a process to its end. Return its exit code and what it printed; its errors are in this process's stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        said = ""
        for line in self._process.stdout:
            if line.startswith("exit code "):
                return int(line.split()[-1]), said
            said += line
        raise AssertionError("the process that forks has ended")

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
