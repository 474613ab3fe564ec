"""Errors of the HTTP API: every exception becomes one kind of error object, in OpenAI's format."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from codd.decoding.options import Options
from codd.errors import CoddError, ImpossibleEvidence, InvalidEvidence, InvalidInput
from codd.serving.encoding import json_response
from codd.validation import explain, is_missing, is_unknown

MAX_QUOTED = 100
"""The most characters of a request that an error message repeats."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout"}
"""OpenAI's error types by status; others are invalid_request_error below 500, and server_error from there on."""

INTERNAL = "Something went wrong in the server; its log has the details."
log = logging.getLogger("codd.serving")
_NAMES = ("prompt", "ids", "window", "written", *(field.name for field in fields(Options) if field.name != "hooks"))
_FIELD = re.compile(rf"\b({'|'.join(_NAMES)})\b")


class ErrorDetails(BaseModel):
    """What went wrong, and with which field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetails


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "A value that cannot be used; param names the field.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        413: "The body is too large.",
        422: "A request that is malformed; param names the field.",
        429: "The queue is full; Retry-After says when to come back.",
        503: "The server is shutting down.",
        504: "The deadline passed before the response was complete.",
    }.items()
}
"""Error responses of every route under /v1, for the OpenAPI document."""


class APIError(Exception):
    """An error response: raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """``status``: HTTP status; ``param``: the field of the request that is wrong; ``code``: for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for this kind of error."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_json(self) -> dict[str, Any]:
        """The body of the response."""
        details = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": details}

    def response(self) -> Response:
        """The response."""
        return json_response(self.as_json(), self.status, self.headers)


def bad_request(error: CoddError, param: str | None = None) -> APIError:
    """A 400 for a prompt or an option that codd refuses; by default ``param`` is the first field in the message."""
    named = _FIELD.search(str(error))
    return APIError(400, str(error), param or (named[1] if named else "body"))


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """Make a 400 of what codd refuses in the block, as `bad_request` does."""
    try:
        yield
    except CoddError as error:
        raise bad_request(error, param) from None


def to_api_error(error: Exception) -> APIError:
    """The error response for an exception; one that is not expected is a 500 that reveals nothing about it."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _framework_error(error)
    if isinstance(error, InvalidInput):
        return bad_request(error)
    if isinstance(error, InvalidEvidence | ImpossibleEvidence):  # circuit_temperature=1e-300 and its like
        message = "With these options the numbers of the model overflow: choose less extreme ones."
        return APIError(400, message, "circuit_temperature")
    return APIError(500, INTERNAL, code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Answer every exception of the application with an error object."""
    expected = (APIError, InvalidInput, InvalidEvidence, ImpossibleEvidence)  # in normal operation: not logged
    for kind in (*expected, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _handle_unexpected)


async def _handle(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return to_api_error(error).response()


def _framework_error(error: HTTPException) -> APIError:
    """What Starlette or FastAPI refuses: unknown paths, wrong methods, unreadable bodies."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return APIError(404, "There is nothing at this address.", code="not_found", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        return APIError(405, f"This address takes {allowed}.", code="method_not_allowed", headers=headers)
    if error.status_code == 400:  # raised where a body cannot be parsed for another reason than its syntax
        message = "The body cannot be read: it must be UTF-8, nested less deeply, with numbers of a sane length."
        return APIError(400, message, param="body", headers=headers)
    return APIError(error.status_code, str(error.detail)[:MAX_QUOTED], headers=headers)


def _validation_error(error: RequestValidationError) -> APIError:
    """A 422 about the first wrong field; if its type is a union, about the members that matched furthest."""
    details = [(_path(detail, error.body), detail) for detail in error.errors()]
    field = details[0][0][:1]
    of_field = [(path, detail) for path, detail in details if path[:1] == field]
    deepest = max((path for path, _ in of_field), key=len)
    messages = [_message(detail) for path, detail in of_field if path == deepest]
    where = ".".join(deepest)[:MAX_QUOTED] or "body"
    return APIError(422, f"{where}: {', or '.join(dict.fromkeys(messages))}.", param=where)


def _path(detail: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """Where in the request an error is: pydantic's location without its names for the members of unions."""
    location = list(detail["loc"])[1:]
    if detail["type"] == "json_invalid":
        return ()
    path, value = [], body
    for number, part in enumerate(location):
        if isinstance(value, dict) and isinstance(part, str):
            absent = is_missing(detail) and number == len(location) - 1
            if part not in value and not absent:
                continue
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(str(part))
    return tuple(path)


def _message(detail: Mapping[str, Any]) -> str:
    """What is wrong with the value, in lower case and without a full stop."""
    if detail["type"] == "json_invalid":
        return f"is not JSON ({detail['ctx']['error']} at character {detail['loc'][-1]})"
    if is_unknown(detail):
        return "there is no such field"
    if is_missing(detail):
        return "is missing"
    if detail["type"] in ("model_attributes_type", "dict_type", "model_type"):
        return "expected a JSON object (sent with Content-Type: application/json)"
    return explain(detail)
