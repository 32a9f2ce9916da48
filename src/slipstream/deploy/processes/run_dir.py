"""The run directory of a fleet: logs, and the gateway's address, token and CA."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path

from slipstream.deploy.processes.vllm_environment import home
from slipstream.errors import ConfigError, DeadlineExceeded, GatewayLost
from slipstream.gateway.tokens import RUN_TOKEN
from slipstream.runtime.private_files import WatchedFile
from slipstream.runtime.tls import Identity

START_SECONDS = 60.0


def new_run_dir() -> Path:
    """Return a new directory for a run: `$SLIPSTREAM_HOME/runs/…`, by default in the user's cache."""
    return home() / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def read_run_dir(directory: Path) -> tuple[str, str, str]:
    """Return `(address, token, CA)` of the gateway of this directory; the CA is empty without TLS."""
    try:
        facts = json.loads((directory / "gateway.json").read_text())
        return facts["address"], (directory / RUN_TOKEN).read_text().strip(), facts.get("ca", "")
    except FileNotFoundError:
        raise ConfigError(f"no gateway is running in {directory} (it has no gateway.json and token)") from None


def wait_for_gateway(directory: Path, owner: int) -> None:
    """Wait for the gateway that `owner`, the parent of this process, is starting in this directory. A file that the killed
    gateway of another owner has left does not count."""
    until = time.monotonic() + START_SECONDS
    while not _is_started_by(owner, directory):
        if os.getppid() != owner:
            raise GatewayLost(f"process {owner}, which was starting the gateway in {directory}, is gone")
        if time.monotonic() > until:
            raise DeadlineExceeded(f"waited {START_SECONDS:g} s for the gateway of process {owner} in {directory}")
        time.sleep(0.02)


def _is_started_by(owner: int, directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "gateway.json").read_text())["owner"] == owner)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class TokenFile:
    """A token in a file, for those who connect: read again when the file changes."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = WatchedFile(path, path.read_text())
        except OSError as error:
            raise ConfigError(f"the token cannot be read from {path}: {error.strerror}") from None

    def __call__(self) -> str:
        return self._file.text().strip()


def run_token(directory: Path) -> TokenFile:
    """Return the token of the run in this directory, which follows when it is replaced."""
    return TokenFile(directory / RUN_TOKEN)


def run_identity(directory: Path) -> Identity:
    """Return the certificate that those who join by this directory show; none unless its gateway requires one."""
    try:
        facts = json.loads((directory / "gateway.json").read_text())
    except FileNotFoundError:  # the gateway has just ended
        facts = {}
    return Identity(facts.get("certificate", ""), facts.get("key", ""))


def http_url(directory: Path) -> str:
    try:
        return str(json.loads((directory / "gateway.json").read_text()).get("http", ""))
    except FileNotFoundError:  # the gateway has just ended
        return ""
