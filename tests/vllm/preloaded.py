"""A process that imports vLLM once and forks for every command. An import takes fifteen seconds, and most tests would need
several: where vLLM would spawn processes of its own, those of a fork are forks, too.

    server = Preloaded(python, log)
    process = server.popen([python, "-m", "module", ...], stdout=file, stderr=file, env=...)       # as subprocess.Popen

`test_weights.py` starts its engine without it, as users do."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.lora.lora_model",
    "vllm.lora.worker_manager",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class Preloaded:
    def __init__(self, python: str, log: Path) -> None:
        with open(log, "ab") as file:
            self._server = subprocess.Popen(
                [python, "-m", "tests.vllm.preloaded"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._python, self._log, self.pid = python, log, self._server.pid

    def popen(self, command: Sequence[str], *, stdout: Any, stderr: Any, env: Mapping[str, str]) -> Process:
        """`stdout` and `stderr` are files, or their paths."""
        python, option, module, *arguments = command
        assert (python, option) == (self._python, "-m"), command
        logs = [str(file if isinstance(file, Path) else file.name) for file in (stdout, stderr)]
        return Process(self, self.ask(module=module, arguments=arguments, env=dict(env), logs=logs))

    def ask(self, **question: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the server has died: {self._log.read_text()[-4000:]}"
        return json.loads(answer)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)


class Process:
    """A child of the server."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- the server ---


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    registry._run_in_subprocess = lambda inspect: inspect()  # a server's own, for which it would import vLLM once more
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # before other modules import it
    for module in MODULES:
        importlib.import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        question = json.loads(line)
        if "pid" in question:
            pid, status = os.waitpid(question["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            answers.close()
            become(**question)
            return
        print(json.dumps(answer), file=answers, flush=True)


def become(module: str, arguments: list[str], env: dict[str, str], logs: list[str]) -> None:
    """Be what `python -m module arguments` with these variables would be."""
    os.setsid()
    for number, path in enumerate([os.devnull, *logs]):
        file = os.open(path, os.O_RDWR if number == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if any(Path(path, "sitecustomize.py").exists() for path in sys.path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
