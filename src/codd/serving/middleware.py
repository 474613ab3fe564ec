"""Middleware in front of the application: limits, names, origins, the key; security headers, request ids, metrics.

Plain ASGI, so that streams stream and disconnects are seen. `with_middleware` puts them in order.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection
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
OPEN = ("/", "/health", "/favicon.ico")
"""Paths that need no key, like the static files of the playground."""
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
    metrics_port: int | None = None
    """A port of this server that has metrics and probes only, for everybody who can reach it."""


def with_middleware(
    app: ASGIApp, security: Security, metrics: Metrics, paths: Collection[str] = (), requests: int = 256
) -> ASGIApp:
    """The application inside of all middleware.

    ``metrics`` counts requests, by name those to one of ``paths``; ``requests``: how many may be under way at once.
    """
    app = Checks(app, security, requests)
    if security.origins:  # outside of the checks: browsers send preflight requests without the key
        app = CORSMiddleware(
            app,
            allow_origins=security.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return Envelope(app, bool(security.origins), metrics, paths)


class Checks:
    """Refuses too many requests at once, unknown names of the server, foreign origins, wrong keys and large bodies.

    Probes pass all but the last, and so do metrics that are asked for at a port of their own.
    """

    def __init__(self, app: ASGIApp, security: Security, limit: int):
        """``limit``: requests at once."""
        self.app, self.security, self.limit, self.running = app, security, limit, 0
        named = tuple(host.lower() for host in security.hosts if host != "*")
        self._named = frozenset(host for host in named if not host.startswith("*."))
        self._suffixes = tuple(host[1:] for host in named if host.startswith("*."))
        self._any_address = security.bound in ("0.0.0.0", "::", "")
        self._key = None if security.api_key is None else hashlib.sha256(security.api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, headers = scope["path"], Headers(scope=scope)
        # About the port of its connection no header can lie.
        at_metrics_port = self.security.metrics_port is not None and scope["server"][1] == self.security.metrics_port
        open_door = path in PROBES or (at_metrics_port and path == METRICS)
        refused = None if open_door else self._refused(path, headers, at_metrics_port)
        stated = headers.get("content-length", "0")  # a number: the server under this one refuses anything else
        if refused is None and (len(stated) > 18 or int(stated) > self.security.max_body):
            refused = self._too_large()
        if refused is not None:
            return await refused.response()(scope, receive, send)
        counted = not open_door and path != METRICS  # metrics are needed above all when there is too much to do
        self.running += counted
        try:
            await self._with_body(scope, receive, send)
        finally:
            self.running -= counted

    def _refused(self, path: str, headers: Headers, at_metrics_port: bool) -> APIError | None:
        if at_metrics_port:
            return APIError(404, f"At this port there are {METRICS} and {', '.join(PROBES)}.", code="not_found")
        if self.running >= self.limit and path != METRICS:
            message = f"{self.limit} requests are under way: try again in a second (codd serve --connections)."
            return APIError(503, message, code="too_many_requests", headers={"Retry-After": "1"})
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            message = (
                "The Host header has a name by which this server may not be called: start it with codd serve "
                "--allow-host NAME (or * for any), or call it by its address."
            )
            return APIError(400, message, param="Host", code="unknown_host")
        if origin is not None and not self._may_call(origin, host):
            message = (
                "Pages of this Origin may not call the server: start it with codd serve --cors ORIGIN, or with "
                "--allow-host NAME if that is a name of the server."
            )
            return APIError(403, message, param="Origin", code="foreign_origin")
        page = path in OPEN or (path.startswith("/playground/") and "/../" not in path)
        if not page and not self._has_key(headers):
            return APIError(
                401,
                "This server wants an API key, and this request has none that it knows: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer realm="codd"'},
            )
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a Host header (a name or an address, perhaps with a port) names this server.

        A page of another site can make its own name point to this machine (DNS rebinding) and then read every response;
        but the browser says by which name it calls. Addresses cannot be made to point elsewhere.
        """
        if "*" in self.security.hosts:
            return True
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d+)?", host.lower())
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        if name in (*LOOPBACK, self.security.bound.lower()) or self._is_named(name):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback

    def _is_named(self, name: str) -> bool:
        return name in self._named or name.endswith(self._suffixes or ("\n",))

    def _may_call(self, origin: str, host: str) -> bool:
        """Whether pages of an origin may call: those of this server, by the name in the request or a given one."""
        if {"*", origin} & {*self.security.origins} or "*" in self.security.hosts:
            return True
        scheme, _, place = origin.lower().partition("://")
        return scheme in ("http", "https") and (place == host.lower() or self._is_named(place.partition(":")[0]))

    def _has_key(self, headers: Headers) -> bool:
        """Whether the request has the key. Digests are compared, so that not even its length can be measured."""
        scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        return self._key is None or (hmac.compare_digest(given, self._key) and scheme.lower() == b"bearer")

    def _too_large(self) -> APIError:
        # The connection stays open, or the client might not see this: the rest of the body is read and dropped, within
        # the time that a body may take.
        message = f"The body is larger than {self.security.max_body} bytes."
        return APIError(413, message, param="body", code="body_too_large")

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the limit, then replay it to the application."""
        messages: list[Message] = []
        size = 0
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if size > self.security.max_body:
                return await self._too_large().response()(scope, receive, send)
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


def _cache_control(path: str, status: int) -> str:
    """Responses of the API are never cached; static files may be, but are revalidated each time."""
    dynamic = path.startswith("/v1/") or path in ("/health", METRICS, *PROBES) or status >= 400
    return "no-store" if dynamic else "no-cache"


class Envelope:
    """What every response has: an id, headers for browsers, a place in the metrics and a line in the log.

    The id (``request.state.request_id``, header X-Request-Id) is the client's own if it is printable ASCII of at most
    64 characters. The line has neither body nor query; probes and scrapes that pass have none.
    """

    def __init__(self, app: ASGIApp, shared: bool, metrics: Metrics, paths: Collection[str]):
        """``shared``: whether pages of other sites may use the responses; all but ``paths`` count as "other"."""
        self.app, self.metrics, self.paths = app, metrics, frozenset(paths)
        self.headers = {**HEADERS, "Cross-Origin-Resource-Policy": "cross-origin" if shared else "same-origin"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers that the application has not set itself, and record status and seconds.

        The framework raises exceptions once more that were answered and logged: these end here. One in the middle of a
        stream goes on to the server, which breaks the connection: the client must notice.
        """
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
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
