"""Structured logs: one line an event, each with the request id, never with prompts.

The request id travels in a context variable, so that every log call inside a request carries it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("paceline_request_id", default=None)

# Attributes every LogRecord has; whatever else one carries was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _utc(created: float, *, millis: bool = True) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{seconds}.{int(created * 1000) % 1000:03d}Z" if millis else seconds


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request_id, then what the event itself says."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (tag := getattr(record, "request_id", None)) is not None:
            line["request_id"] = tag
        line |= _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


# A path or a name from outside may hold them: it must not start a line of its own or speak to the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """The same for people. One line, whatever the message holds; an exception follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_utc(record.created)} {record.levelname.lower():7} {record.getMessage()}"
        text += "".join(f" {name}={value}" for name, value in _extras(record).items())
        if (tag := getattr(record, "request_id", None)) is not None:
            text += f" request_id={tag}"
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(form: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (stderr) as "text" or "json". The last call wins."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(_RequestIdFilter())
    root = logging.getLogger()
    for old in [each for each in root.handlers if getattr(each, "paceline", False)]:
        root.removeHandler(old)
    handler.paceline = True  # type: ignore[attr-defined]  # how the next call finds it
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # other people's libraries
    logging.getLogger("paceline").setLevel(level.upper())
