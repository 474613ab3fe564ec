"""The server's log: lines for people or JSON objects for collectors, each with the id of its request."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from codd.serving.requests import REQUEST_ID

LogFormat = Literal["text", "json"]
FIELDS = ("method", "route", "status", "seconds")
"""What the line of a request has beside its message, for those who read JSON."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, request_id (or null), message; of a request also `FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        """A traceback is the field ``exception``, so that a record is always one line."""
        id = getattr(record, "request_id", "-")
        body = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "request_id": None if id == "-" else id,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body)


def _add_request_id(record: logging.LogRecord) -> bool:
    """Add the id of the current request to a record that has none (records of the model's thread have one)."""
    record.request_id = getattr(record, "request_id", REQUEST_ID.get())
    return True


def formatted(handler: logging.Handler, log_format: LogFormat) -> logging.Handler:
    """The handler; its lines for people have time, level, id of the request ("-": of none) and message."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(request_id)s %(message)s")
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    return handler


def configure_logs(log_format: LogFormat, *, quiet: bool) -> None:
    """Log to stderr; of other libraries only what goes wrong, with ``quiet`` of this one, too."""
    handler = formatted(logging.StreamHandler(sys.stderr), log_format)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("codd.serving").setLevel(logging.WARNING if quiet else logging.INFO)
