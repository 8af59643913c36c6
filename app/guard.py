"""ASGI middleware that protects the server: Host, Origin, API keys, routes and request size.

Other sites must not reach this server through the user's browser. ``Host`` must be a name of this
server, or a site could point its own name here (DNS rebinding). ``Origin``, if sent, must be this
server's or allowed. Gradio's file routes are closed because the page does not use them. Request
bodies are limited.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import socket
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import error_body

# Makes the browser itself block requests to other servers.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"

# A call carries a message and the whole conversation, as JSON within JSON. A turn with 1 MB of
# files takes 1.1 MB for prose or code, and 3.5 MB for quotes and newlines alone (measured). So
# about 60 such turns fit, or 19 in the worst case.
LARGEST_BODY = 64 * 2**20  # bytes

API = "/gradio_api/"
POSTS = ("queue/join", "run/predict", "cancel", "reset")  # the only ones the page uses
CLOSED = ("file=", "file/", "proxy=")  # these serve files or fetch from other servers
PUBLIC = ("/health", "/v1/health")  # need no key

WILDCARDS = ("0.0.0.0", "::", "")


class Names:
    """The host names of this server."""

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """``host`` is the address to listen on, ``allowed`` are further names.

        Unless the server listens on loopback only, any IP address is accepted: DNS rebinding needs
        a name. So this machine's addresses need not be known; in a container they are not.
        """
        host = host.strip("[]").lower()
        self.allowed = frozenset(name.lower() for name in allowed)
        own = {"localhost", host}
        if host in WILDCARDS:
            name = socket.gethostname().lower()
            own |= {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
        self._names = self.allowed | own - set(WILDCARDS)
        self._any_address = not is_loopback(host)

    def include(self, host: str) -> bool:
        """Whether a ``Host`` header, with or without a port, is one of these names."""
        name = _name_of(f"//{host}")
        try:
            address = ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._names
        return address.is_loopback or self._any_address or name in self._names

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether an ``Origin`` header is this page's, requested with the header ``Host: host``."""
        return urlsplit(origin).netloc.lower() == host.lower() or self.allow_origin(origin)

    def allow_origin(self, origin: str) -> bool:
        """Whether an ``Origin`` is one of the further names."""
        return _name_of(origin) in self.allowed


def _name_of(url: str) -> str:
    """The host of a URL in lower case, without the port; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return host not in WILDCARDS and all(ip_address(where[4][0]).is_loopback for where in found)


class Guard:
    """ASGI middleware: passes what page and endpoint need, and adds ``POLICY`` to every response.

    With ``keys``, a request needs one of them: as a bearer token, as ``X-Api-Key``, or as the
    password of a browser that asks for it. If there are several, the app finds it in the scope's
    ``api_key``.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Names,
        endpoint: Collection[str] = (),
        keys: Collection[str] = (),
        largest: int = LARGEST_BODY,
    ) -> None:
        """``endpoint`` has the paths of the endpoint's routes."""
        self._app = app
        self._names = names
        self._endpoint = endpoint
        self._keys = keys
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if scope["type"] == "websocket":
            if refused is None:
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        send = _with_headers(send, self._cors(headers))
        if refused is None and scope["method"] == "OPTIONS" and "origin" in headers:
            refused = Response(headers={"Allow": "GET, POST, OPTIONS"})
        if refused is None:
            try:
                body = await self._read(scope, receive)
            except ClientDisconnect:
                return  # what came of the body may look like a whole one
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
                return
            refused = self._answer(
                scope,
                413,
                f"This is too much to send at once: the limit is {self._largest / 2**20:.3g} MiB. "
                "Shorten the message or start a new chat; “Export all” saves this one.",
            )
        await refused(scope, receive, send)

    def _cors(self, headers: Headers) -> dict[str, str]:
        """Headers that let a browser give the answer to a page of another, allowed origin."""
        origin = headers.get("origin", "")
        if not origin or not self._names.allow_origin(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "vary": "Origin",
        }

    def _refusal(self, scope: Scope) -> Response | None:
        """A response that refuses the request because of its headers or path; None if allowed."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.include(host):
            port = (scope.get("server") or ("", 7860))[1]
            name = _name_of(f"//{host}")
            return self._answer(
                scope,
                403,
                f"The name {name!r:.80} is not one of this server's; another site may be behind "
                f"this request. Open http://127.0.0.1:{port} on the machine that runs the server. "
                "If the name is yours, start the server with --allow-host and the name.",
            )
        if origin is not None and not self._names.is_own_origin(origin, host):
            return self._answer(
                scope,
                403,
                f"This request comes from a page of {origin!r:.80}, which has no access here. Open "
                "the chat's own address. If a proxy serves the chat, start the server with "
                "--allow-host and the proxy's name.",
            )
        method, is_endpoint = scope.get("method", "GET"), self._is_endpoint(scope)
        path = scope["path"].removeprefix(API)
        is_page_api = path != scope["path"]
        if method in ("GET", "HEAD", "OPTIONS"):
            is_open = not (is_page_api and path.startswith(CLOSED))
        else:
            is_open = is_endpoint or (is_page_api and path in POSTS)
        if not is_open:
            return self._answer(
                scope, 403, "This address is closed because the chat does not use it."
            )
        key = self._key(headers)
        scope["api_key"] = key if len(self._keys) > 1 else None
        is_free = method == "OPTIONS" or scope["path"] in PUBLIC
        if is_free or not self._keys or key is not None:
            return None
        refused = self._answer(
            scope, 401, "This server needs its API key: send it as “Authorization: Bearer KEY”."
        )
        if not is_endpoint:
            refused.headers["WWW-Authenticate"] = 'Basic realm="the API key as the password"'
        return refused

    def _is_endpoint(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path in self._endpoint or path.startswith("/v1/")

    def _key(self, headers: Headers) -> str | None:
        """The one of the keys that a request has."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key", value if kind.lower() == "bearer" else "")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(value).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return None
        found = [key for key in self._keys if hmac.compare_digest(given.encode(), key.encode())]
        return found[0] if found else None

    def _answer(self, scope: Scope, status: int, why: str) -> Response:
        """A refusal with its reason. tab.js shows JSON in the page; Gradio's client does not."""
        if self._is_endpoint(scope):
            return JSONResponse(error_body(why, status), status)
        if status == 413 and Headers(scope=scope).get("content-type") == "application/json":
            return JSONResponse({"error": why, "detail": why}, status)
        return PlainTextResponse(f"{why}\n", status)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request, chunked or not; None if it is too large.

        Raises ClientDisconnect if the client leaves before it has sent all of it.
        """
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self._largest:
            return None
        parts, n_bytes = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            n_bytes += len(parts[-1])
            if n_bytes > self._largest:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that yields the body again."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _with_headers(send: Send, more: Mapping[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"].append((b"content-security-policy", POLICY.encode()))
            message["headers"] += [(k.encode(), v.encode()) for k, v in more.items()]
        await send(message)

    return send_with_headers
