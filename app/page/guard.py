"""ASGI middleware that protects the page's server: Host, Origin, routes and request size.

Other sites must not reach this server through the user's browser. ``Host`` must be a name of this
server, or a site could point its own name here (DNS rebinding). ``Origin``, if sent, must be this
page's. Gradio's file routes are closed because the page does not use them. Request bodies are
limited.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Makes the browser itself block requests to other servers.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"

# A call carries a message and the whole conversation, as JSON within JSON. A turn with 1 MB of
# files takes 1.1 MB for prose or code, and 3.5 MB for quotes and newlines alone (measured). So
# about 60 such turns fit, or 19 in the worst case.
LARGEST_BODY = 64 * 2**20  # bytes

API = "/gradio_api/"
POSTS = ("queue/join", "run/predict", "cancel", "reset")  # the only ones the page uses
CLOSED = ("file=", "file/", "proxy=")  # these serve files or fetch from other servers

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
        self._any_address = not _is_loopback(host)

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
        return urlsplit(origin).netloc.lower() == host.lower() or _name_of(origin) in self.allowed


def _name_of(url: str) -> str:
    """The host of a URL in lower case, without the port; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return host not in WILDCARDS and all(ip_address(where[4][0]).is_loopback for where in found)


class Guard:
    """ASGI middleware: passes what the page needs and adds ``POLICY`` to every response."""

    def __init__(self, app: ASGIApp, names: Names, largest: int = LARGEST_BODY) -> None:
        self._app = app
        self._names = names
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
        if refused is None:
            body = await self._read(scope, receive)
            if body is not None:
                await self._app(scope, _replayed(body, receive), _with_policy(send))
                return
            refused = _answer(
                scope,
                413,
                f"This is too much to send at once: the limit is {self._largest / 2**20:.3g} MiB. "
                "Shorten the message or start a new chat; “Export all” saves this one.",
            )
        await refused(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """A response that refuses the request because of its headers or path; None if allowed."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.include(host):
            port = (scope.get("server") or ("", 7860))[1]
            name = _name_of(f"//{host}")
            return _answer(
                scope,
                403,
                f"The name {name!r:.80} is not one of this server's; another site may be behind "
                f"this request. Open http://127.0.0.1:{port} on the machine that runs the server. "
                "If the name is yours, start the server with --allow-host and the name.",
            )
        if origin is not None and not self._names.is_own_origin(origin, host):
            return _answer(
                scope,
                403,
                f"This request comes from a page of {origin!r:.80}, which has no access here. Open "
                "the chat's own address. If a proxy serves the chat, start the server with "
                "--allow-host and the proxy's name.",
            )
        path = scope["path"].removeprefix(API)
        is_api = path != scope["path"]
        if scope.get("method", "GET") in ("GET", "HEAD", "OPTIONS"):
            is_open = not (is_api and path.startswith(CLOSED))
        else:
            is_open = is_api and path in POSTS
        if is_open:
            return None
        return _answer(scope, 403, "This address is closed because the chat does not use it.")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request, chunked or not; None if it is too large."""
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self._largest:
            return None
        parts, n_bytes = [], 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            n_bytes += len(parts[-1])
            if n_bytes > self._largest:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _answer(scope: Scope, status: int, why: str) -> Response:
    """A refusal with its reason. tab.js shows the JSON in the page; Gradio's client does not."""
    if status == 413 and Headers(scope=scope).get("content-type") == "application/json":
        return JSONResponse({"error": why, "detail": why}, status)
    return PlainTextResponse(f"{why}\n", status)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that yields the body again."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _with_policy(send: Send) -> Send:
    async def send_with_policy(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"].append((b"content-security-policy", POLICY.encode()))
        await send(message)

    return send_with_policy
