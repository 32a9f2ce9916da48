"""The run directory of a fleet: logs, and the gateway's address, token and CA."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from slipstream.deploy.processes.vllm_environment import home
from slipstream.errors import ConfigError


def new_run_dir() -> Path:
    """Return a new directory for a run: `$SLIPSTREAM_HOME/runs/…`, by default in the user's cache."""
    return home() / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def read_run_dir(directory: Path) -> tuple[str, str, str]:
    """Return `(address, token, CA)` of the gateway of this directory; the CA is empty without TLS."""
    try:
        facts = json.loads((directory / "gateway.json").read_text())
        return facts["address"], (directory / "token").read_text().strip(), facts.get("ca", "")
    except FileNotFoundError:
        raise ConfigError(f"no gateway is running in {directory} (it has no gateway.json and token)") from None


def http_url(directory: Path) -> str:
    try:
        return str(json.loads((directory / "gateway.json").read_text()).get("http", ""))
    except FileNotFoundError:  # the gateway has just ended
        return ""
