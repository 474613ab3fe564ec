"""Middleware in front of the application: limits, API key, host check, security headers, request ids, metrics.

Plain ASGI, so that streams stream and disconnects are seen. `with_middleware` puts them in order.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codd.serving.errors import APIError
from codd.serving.metrics import Metrics
from codd.serving.requests import REQUEST_ID

_log = logging.getLogger("codd.serving")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
}
PROBES = ("/health/live", "/health/ready")
"""Paths for the probes of a cluster, which know neither the key nor a name of the server, and must pass under load."""
METRICS = "/metrics"
_REQUEST_ID = re.compile(r"[!-~]{1,64}")


@dataclass(frozen=True)
class Security:
    """Who may call a server, under which names, and with how large a body."""

    bound: str = "127.0.0.1"
    """The address that the server listens on."""
    hosts: tuple[str, ...] = ()
    """Further host names by which it may be called: "example.org", "*.example.org", or "*" for any."""
    api_key: str | None = None
    """The key that clients must send; None: no key is needed."""
    max_body: int = 1_000_000
    """The largest request body, in bytes."""
    origins: tuple[str, ...] = ()
    """Origins of other sites whose pages may call the server (CORS)."""
    open_paths: tuple[str, ...] = ("/", "/health", "/favicon.ico")
    """Paths that need no key."""
    open_folders: tuple[str, ...] = ("/playground/",)
    """Folders of static files, which need no key either; each ends in a slash."""
    metrics_port: int | None = None
    """A port of this server that has metrics and probes only, for everybody who can reach it."""


def with_middleware(
    app: ASGIApp, security: Security, metrics: Metrics, paths: Collection[str] = (), requests: int = 256
) -> ASGIApp:
    """The application inside of all middleware; the last one added is the outermost.

    ``metrics`` counts requests, by name those to one of ``paths``; ``requests``: how many may be under way at once.
    """
    app = bare = BodyLimit(app, security.max_body)
    if security.api_key is not None:
        app = ApiKeyCheck(app, security.api_key, security.open_paths, security.open_folders)
    if security.origins:  # outside of the key: browsers send preflight requests without it
        app = CORSMiddleware(
            app,
            allow_origins=security.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if "*" not in security.hosts:
        app = HostCheck(app, security.bound, security.hosts)
    return Envelope(Doors(app, bare, security.metrics_port, requests), bool(security.origins), metrics, paths)


class HTTPMiddleware:
    """Base of middleware: HTTP requests go through ``handle``, all else (lifespan events) straight to the app."""

    def __init__(self, app: ASGIApp):
        """``app``: the application inside."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry point."""
        await (self.handle if scope["type"] == "http" else self.app)(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        raise NotImplementedError


class BodyLimit(HTTPMiddleware):
    """Refuses large bodies with 413: by their Content-Length, and without one as soon as they are too large."""

    def __init__(self, app: ASGIApp, limit: int):
        """``limit`` is in bytes."""
        super().__init__(app)
        self.limit = limit

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the limit, then replay it to the application."""
        stated = Headers(scope=scope).get("content-length", "0")
        # The connection stays open, or the client might not see this: the rest of the body is read and dropped, within
        # the time that a body may take.
        too_large = APIError(413, f"The body is larger than {self.limit} bytes.", param="body", code="body_too_large")
        if not (stated.isascii() and stated.isdigit()):
            malformed = APIError(400, "Content-Length must be a number of bytes.", param="body")
            return await malformed.response()(scope, receive, send)
        if len(stated) > 18 or int(stated) > self.limit:
            return await too_large.response()(scope, receive, send)
        messages: list[Message] = []
        size = 0
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if size > self.limit:
                return await too_large.response()(scope, receive, send)
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


class Doors(HTTPMiddleware):
    """Leads probes past the checks of key and host, and metrics too if they are asked for at a port of their own.

    Answers 503 while too many requests are under way; probes and metrics pass, which are needed then above all.
    """

    def __init__(self, app: ASGIApp, bare: ASGIApp, metrics_port: int | None, limit: int):
        """``bare``: the application without these checks; ``limit``: requests at once."""
        super().__init__(app)
        self.bare, self.metrics_port, self.limit, self.running = bare, metrics_port, limit, 0

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Choose by path, and by the port of the connection, about which no header can lie."""
        at_metrics_port = self.metrics_port is not None and scope["server"][1] == self.metrics_port
        if scope["path"] in PROBES or (at_metrics_port and scope["path"] == METRICS):
            return await self.bare(scope, receive, send)
        if scope["path"] == METRICS:
            return await self.app(scope, receive, send)
        if at_metrics_port:
            nothing = APIError(404, f"At this port there are {METRICS} and {', '.join(PROBES)}.", code="not_found")
            return await nothing.response()(scope, receive, send)
        if self.running >= self.limit:
            message = f"{self.limit} requests are under way: try again in a second (codd serve --connections)."
            refused = APIError(503, message, code="too_many_requests", headers={"Retry-After": "1"})
            return await refused.response()(scope, receive, send)
        self.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running -= 1


class ApiKeyCheck(HTTPMiddleware):
    """Refuses requests without ``Authorization: Bearer KEY`` with 401, except for open paths and folders."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str], open_folders: Sequence[str]):
        """``open_folders`` end in a slash."""
        super().__init__(app)
        self.open_paths = frozenset(open_paths)
        self.open_folders = tuple(open_folders)
        self._digest = hashlib.sha256(key.encode()).digest()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it without saying what was wrong with its key."""
        if self._is_open(scope["path"]) or self._has_key(scope):
            return await self.app(scope, receive, send)
        refused = APIError(
            401,
            "This server wants an API key, and this request has none that it knows: Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="codd"'},
        )
        await refused.response()(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self.open_paths or (path.startswith(self.open_folders) and "/../" not in path)

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request has the key. Digests are compared, so that not even its length can be measured."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return bool(scheme.lower() == b"bearer") and same


class HostCheck(HTTPMiddleware):
    """Refuses requests whose Host header is not a name of this server with 400.

    A page of another site can make its own name point to this machine (DNS rebinding) and then read every response;
    but the browser says by which name it calls. Addresses cannot be made to point elsewhere.
    """

    def __init__(self, app: ASGIApp, bound: str, hosts: Sequence[str]):
        """``bound``: the address that the server listens on; ``hosts``: further names, "*.NAME" for all below one."""
        super().__init__(app)
        self.names = {*LOOPBACK, bound.lower(), *(host.lower() for host in hosts if not host.startswith("*."))}
        self.suffixes = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self.any_address = bound in ("0.0.0.0", "::", "")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if self._is_own(Headers(scope=scope).get("host", "")):
            return await self.app(scope, receive, send)
        message = (
            "The Host header has a name by which this server may not be called: start it with codd serve --allow-host "
            "NAME (or * for any), or call it by its address."
        )
        await APIError(400, message, param="Host", code="unknown_host").response()(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Whether a Host header (a name or an address, perhaps with a port) names this server."""
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d+)?", host.lower())
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        if name in self.names or (self.suffixes and name.endswith(self.suffixes)):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback


def _cache_control(path: str, status: int) -> str:
    """Responses of the API are never cached; static files may be, but are revalidated each time."""
    dynamic = path.startswith("/v1/") or path in ("/health", METRICS, *PROBES) or status >= 400
    return "no-store" if dynamic else "no-cache"


class Envelope(HTTPMiddleware):
    """What every response has: an id, headers for browsers, a place in the metrics and a line in the log.

    The id (``request.state.request_id``, header X-Request-Id) is the client's own if it is printable ASCII of at most
    64 characters. The line has neither body nor query; probes and scrapes that pass have none.
    """

    def __init__(self, app: ASGIApp, shared: bool, metrics: Metrics, paths: Collection[str]):
        """``shared``: whether pages of other sites may use the responses; all but ``paths`` count as "other"."""
        super().__init__(app)
        self.headers = {**HEADERS, "Cross-Origin-Resource-Policy": "cross-origin" if shared else "same-origin"}
        self.metrics, self.paths = metrics, frozenset(paths)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers that the application has not set itself, and record status and seconds.

        The framework raises exceptions once more that were answered and logged: these end here. One in the middle of a
        stream goes on to the server, which breaks the connection: the client must notice.
        """
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(id)  # every request is a task, with a context of its own
        started, status, complete = time.monotonic(), 499, False  # unless something is sent, the client has gone

        async def watching_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", _cache_control(scope["path"], status))
                headers["X-Request-Id"] = id
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app({**scope, "state": {**scope.get("state", {}), "request_id": id}}, receive, watching_send)
        except Exception:
            if not complete:
                raise
        finally:
            self._record(scope, status, time.monotonic() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self.paths else "other"
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.request_seconds.labels(path).observe(seconds)
        fields = {"method": scope["method"], "route": path, "status": status, "seconds": round(seconds, 6)}
        routine = status == 200 and path in (*PROBES, METRICS)  # every few seconds, for ever
        level = logging.DEBUG if routine else logging.INFO
        _log.log(level, "%s %s %d %.3f s", scope["method"], path, status, seconds, extra=fields)
