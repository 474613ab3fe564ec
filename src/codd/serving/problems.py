"""Everything that can go wrong with a request, as the one error object that clients get."""

import logging
import re
from collections.abc import Mapping
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
from codd.serving.answers import dump
from codd.serving.tickets import Broken, Busy, Closing, Late

LONGEST = 100
"""No more characters than this of what a client sent are ever sent back."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout"}
"""OpenAI's names; other statuses are invalid_request_error below 500, and server_error from there on."""

log = logging.getLogger("codd.serving")
_FIELD = re.compile(r"\b(prompt|" + "|".join(field.name for field in fields(Options) if field.name != "hooks") + r")\b")


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

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
        504: "The deadline passed before the answer was complete.",
    }.items()
}
"""For the OpenAPI document of every route under /v1."""


class Problem(Exception):
    """An answer that is an error: raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """``param`` names the field of the request, ``code`` is for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The name that OpenAI has for this kind."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_json(self) -> dict[str, Any]:
        """The error object."""
        details = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": details}

    def response(self) -> Response:
        """The whole answer."""
        return Response(dump(self.as_json()), self.status, self.headers, "application/json")


FORESEEN = (InvalidInput, InvalidEvidence, ImpossibleEvidence, Busy, Closing, Late, Broken)
"""What models and the engine raise in the course of things: not logged, or logged already."""


def refused(error: CoddError, param: str | None = None) -> Problem:
    """An option or a prompt that codd refuses; without ``param``, the first field that the message speaks of."""
    found = _FIELD.search(str(error))
    return Problem(400, str(error), param or (found[1] if found else None))


def problem_of(error: Exception) -> Problem:
    """What a client is told of any exception; of those that nobody foresaw, nothing but that there was one."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _malformed(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, InvalidInput):
        return refused(error)
    if isinstance(error, InvalidEvidence | ImpossibleEvidence):  # circuit_temperature=1e-300 and its like
        return Problem(400, "With these options the numbers of the model overflow: choose less extreme ones.")
    if isinstance(error, Busy):
        return Problem(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, Closing):
        return Problem(503, str(error), code="shutting_down")
    if isinstance(error, Late):
        return Problem(504, str(error), param="timeout", code="deadline_passed")
    return Problem(500, "Something went wrong in the server; its log has the details.", code="internal_error")


def install(app: FastAPI) -> None:
    """Make every error of the application an error object."""
    for kind in (Problem, RequestValidationError, HTTPException, *FORESEEN):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(Exception, _answer_unforeseen)


async def _answer(request: Request, error: Exception) -> Response:
    return problem_of(error).response()


async def _answer_unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_of(error).response()


def _of_http(error: HTTPException) -> Problem:
    """What the framework itself refuses."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return Problem(404, "There is nothing at this address.", code="not_found", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        return Problem(405, f"This address takes {allowed}.", code="method_not_allowed", headers=headers)
    if error.status_code == 400:  # raised where a body cannot be parsed for another reason than its syntax
        message = "The body cannot be read: it must be UTF-8, nested less deeply, with numbers of a sane length."
        return Problem(400, message, param="body", headers=headers)
    return Problem(error.status_code, str(error.detail)[:LONGEST], headers=headers)


def _malformed(error: RequestValidationError) -> Problem:
    """The first field that is wrong; of the ways in which it could have been right, the ones that came closest."""
    wrong = [(_path(item, error.body), item) for item in error.errors()]
    field = wrong[0][0][:1]
    same = [(path, item) for path, item in wrong if path[:1] == field]
    deepest = max((path for path, _ in same), key=len)
    messages = [_message(item) for path, item in same if path == deepest]
    where = ".".join(deepest)[:LONGEST] or "body"
    return Problem(422, f"{where}: {', or '.join(dict.fromkeys(messages))}.", param=where)


def _path(item: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """Where an error is, without pydantic's names for the members of unions, which are not in the request."""
    location = [part for part in item["loc"]][1:]
    if item["type"] == "json_invalid":
        return ()
    found, at = [], body
    for number, part in enumerate(location):
        if isinstance(at, dict) and isinstance(part, str):
            absent = item["type"] == "missing" and number == len(location) - 1
            if part not in at and not absent:
                continue
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
        else:
            continue
        found.append(str(part))
    return tuple(found)


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"is not JSON ({item['ctx']['error']} at character {item['loc'][-1]})"
    if item["type"] == "extra_forbidden":
        return "there is no such field"
    if item["type"] == "missing":
        return "is missing"
    if item["type"] in ("model_attributes_type", "dict_type", "model_type"):
        return "expected a JSON object (sent with Content-Type: application/json)"
    text = str(item["msg"]).removesuffix(".")
    return text[:1].lower() + text[1:]
