"""Logging of commands that run for long: gateways, engines, nodes of a job and training."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LOG_FORMAT = "SLIPSTREAM_LOG_FORMAT"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        help="text, or json for one object per line; also for the processes that this command starts.",
        envvar=LOG_FORMAT,
    ),
]


def log_to_stderr(
    form: LogFormat = LogFormat.text, process: str = "", engine: str = "", run_dir: Path | None = None
) -> None:
    """Log to stderr, as text or as JSON lines with these fields. Child processes inherit the format."""
    os.environ[LOG_FORMAT] = form.value
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.json:
        from slipstream.runtime.json_logs import JsonFormatter
        from slipstream.runtime.waiting import say_in_log

        say_in_log()
        run = run_dir.resolve().name if run_dir is not None else ""
        handler.setFormatter(JsonFormatter({"process": process, "engine": engine, "run": run}))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it names each kind of device that is not there
