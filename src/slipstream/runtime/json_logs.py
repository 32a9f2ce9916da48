"""Log records as JSON lines, for log collectors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "process": "engine", "engine": "engine-0", "run": …, "logger": …, "message": …}`, and of an
    exception `error`, its class, and `traceback`."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        """`facts` are the same in every record: `process`, and where known `engine` and `run`."""
        super().__init__()
        self._facts = {name: value for name, value in facts.items() if value}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._facts,
            "logger": record.name,
            "message": record.getMessage(),
        }
        errors = [arg for arg in record.args or () if isinstance(arg, BaseException)]
        if record.exc_info and record.exc_info[0] is not None:
            fields |= {"error": record.exc_info[0].__name__, "traceback": self.formatException(record.exc_info)}
        elif errors:
            fields["error"] = type(errors[0]).__name__
        return json.dumps(fields, ensure_ascii=False)
