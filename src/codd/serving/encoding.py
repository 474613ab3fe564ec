"""Values as JSON, and as server-sent events."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

Json = dict[str, Any]
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
"""Headers of a response that is a stream of events: proxies must not buffer it."""
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


def to_json(value: Any) -> bytes:
    """JSON that every parser accepts: numbers that are not finite become null, and all of it is ASCII.

    Escapes can also express what UTF-8 cannot (half of a surrogate pair), and no line separator that a client may
    stumble over (U+2028) appears in an event as it is.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    """The same value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is JSON."""
    return Response(to_json(value), status, headers, "application/json")


def sse_event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event with a JSON body; OpenAI's events have no name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"
