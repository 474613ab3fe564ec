"""What stands between the network and the application: limits, keys, and headers.

Plain ASGI middlewares, so that streams stream and disconnects are seen. `guarded` puts them in order.
"""

import hashlib
import hmac
import ipaddress
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codd.serving.problems import Problem

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
_REQUEST_ID = re.compile(r"[!-~]{1,64}")


@dataclass(frozen=True)
class Guards:
    """How a server is guarded."""

    bound: str = "127.0.0.1"
    """The address that it listens on."""
    hosts: tuple[str, ...] = ()
    """Further names by which it may be called: "example.org", "*.example.org", or "*" for any."""
    api_key: str | None = None
    max_body: int = 1_000_000
    """Bytes."""
    origins: tuple[str, ...] = ()
    """Pages of other sites that may call it (CORS)."""
    open_paths: tuple[str, ...] = ("/", "/health", "/favicon.ico")
    """What needs no key."""
    open_folders: tuple[str, ...] = ("/playground/",)
    """Folders of static files, which need none either."""


def guarded(app: ASGIApp, guards: Guards) -> ASGIApp:
    """The application behind all guards; the last named is the outermost."""
    app = BodyLimit(app, guards.max_body)
    if guards.api_key is not None:
        app = ApiKey(app, guards.api_key, guards.open_paths, guards.open_folders)
    if guards.origins:  # outside of the key: browsers ask for permission without it
        app = CORSMiddleware(
            app,
            allow_origins=guards.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if "*" not in guards.hosts:
        app = HostCheck(app, guards.bound, guards.hosts)
    return RequestId(SecurityHeaders(AnsweredErrors(app), shared=bool(guards.origins)))


class BodyLimit:
    """Refuses large bodies: by what they say of themselves, and else as soon as they are too large."""

    def __init__(self, app: ASGIApp, limit: int):
        """``limit`` is in bytes."""
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body as far as it is allowed to go, and hand it on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        stated = Headers(scope=scope).get("content-length", "0")
        too_large = Problem(
            413,
            f"The body is larger than {self.limit} bytes.",
            param="body",
            code="body_too_large",
            headers={"Connection": "close"},  # the rest of it is not going to be read
        )
        if not (stated.isascii() and stated.isdigit()):
            refused = Problem(400, "Content-Length must be a number of bytes.", param="body")
            return await refused.response()(scope, receive, send)
        if len(stated) > 18 or int(stated) > self.limit:
            return await too_large.response()(scope, receive, send)
        read: list[Message] = []
        size = 0
        while not read or (read[-1]["type"] == "http.request" and read[-1].get("more_body", False)):
            read.append(await receive())
            size += len(read[-1].get("body", b""))
            if size > self.limit:
                return await too_large.response()(scope, receive, send)
        read.reverse()

        async def replayed() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, replayed, send)


class ApiKey:
    """Asks for ``Authorization: Bearer KEY`` wherever it is not told to leave the door open."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str], open_folders: Sequence[str]):
        """``open_folders`` end in a slash."""
        self.app = app
        self.open_paths = frozenset(open_paths)
        self.open_folders = tuple(open_folders)
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare, and say nothing but whether it was right."""
        if scope["type"] != "http" or self._open(scope["path"]) or self._known(scope):
            return await self.app(scope, receive, send)
        refused = Problem(
            401,
            "This server wants an API key, and this request has none that it knows: Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="codd"'},
        )
        await refused.response()(scope, receive, send)

    def _open(self, path: str) -> bool:
        return path in self.open_paths or (path.startswith(self.open_folders) and "/../" not in path)

    def _known(self, scope: Scope) -> bool:
        """Digests are compared, so that not even the length of the key can be measured."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        right = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return bool(scheme.lower() == b"bearer") and right


class HostCheck:
    """Refuses requests that were sent to a name which is not ours.

    A page of another site can make its own name point to this machine (DNS rebinding) and then read every answer; but
    the browser says by which name it calls. Addresses cannot be made to point elsewhere.
    """

    def __init__(self, app: ASGIApp, bound: str, hosts: Sequence[str]):
        """``bound``: the address that the server listens on; ``hosts``: more names."""
        self.app = app
        self.names = {*LOOPBACK, bound.lower(), *(host.lower() for host in hosts if not host.startswith("*."))}
        self.endings = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self.everywhere = bound in ("0.0.0.0", "::", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the name."""
        if scope["type"] != "http" or self._ours(Headers(scope=scope).get("host", "")):
            return await self.app(scope, receive, send)
        message = "This server is not known under the name that the request was sent to: start it with that name."
        await Problem(400, message, param="Host", code="unknown_host").response()(scope, receive, send)

    def _ours(self, host: str) -> bool:
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d+)?", host.lower())
        if found is None:
            return False
        name = found[1].strip("[]").removesuffix(".")
        if name in self.names or (self.endings and name.endswith(self.endings)):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.everywhere or address.is_loopback


class SecurityHeaders:
    """Tells browsers what the page may do, and what may be kept."""

    def __init__(self, app: ASGIApp, shared: bool = False):
        """``shared``: other sites may use what comes from here."""
        self.app = app
        self.headers = {**HEADERS, "Cross-Origin-Resource-Policy": "cross-origin" if shared else "same-origin"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add to whatever the application answers."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", _caching(scope["path"], message["status"]))
            await send(message)

        await self.app(scope, receive, with_headers)


def _caching(path: str, status: int) -> str:
    """Answers are nobody's to keep; static files may be, if they are asked about each time."""
    answer = path.startswith("/v1/") or path in ("/health", "/metrics") or status >= 400
    return "no-store" if answer else "no-cache"


class RequestId:
    """Gives every request a name (``request.state.request_id``) and tells it to the client."""

    def __init__(self, app: ASGIApp):
        """A client's own name for it is kept if it is short and printable."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        named = {**scope, "state": {**scope.get("state", {}), "request_id": name}}

        async def with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self.app(named, receive, with_name)


class AnsweredErrors:
    """Ends errors that were answered and logged already; the framework raises them once more.

    An error in the middle of a stream goes on to the server, which breaks the connection: the client must notice.
    """

    def __init__(self, app: ASGIApp):
        """Around the whole application."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Watch whether the answer is complete."""
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if not complete:
                raise
