"""What stands before the page's server: who may ask it, for what, and how much they may send.

A page of another site must not reach this server through the user's browser. Two checks see to it:
``Host`` must be a name of this server, or a site could let its own name point here (DNS rebinding);
and where there is an ``Origin``, it must be this page's. Gradio's routes for files are closed, as
the page needs none of them, and every body is read here, up to a limit.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The browser itself refuses whatever would leave this machine.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"

# A call of the page holds a message and, as JSON within JSON, the whole conversation. A turn with 1 MB
# of files takes 1.1 MB of it in prose or code, 3.5 MB where all is quotes and newlines (measured):
# there is room for about 60 turns with that much, and for 19 at worst.
LARGEST_BODY = 64 * 2**20  # bytes

API = "/gradio_api/"
POSTS = ("queue/join", "run/predict", "cancel", "reset")  # all that the page posts to
CLOSED = ("file=", "file/", "proxy=")  # answers with files, or with what another server says

WILDCARDS = ("0.0.0.0", "::", "")


class Names:
    """The names that this server goes by."""

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """``host`` is the address listened on, ``allowed`` are names that the user adds.

        An address is safe where the server listens on more than the loopback interface: a site can
        give only a name another meaning. So the addresses of this machine need not be known, which
        in a container they are not.
        """
        host = host.strip("[]").lower()
        self.allowed = frozenset(name.lower() for name in allowed)
        own = {"localhost", host}
        if host in WILDCARDS:
            name = socket.gethostname().lower()
            own |= {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
        self._names = self.allowed | own - set(WILDCARDS)
        self._any_address = not _is_loopback(host)

    def are_asked(self, host: str) -> bool:
        """Whether a ``Host`` header, with or without a port, is one of them."""
        name = _name_of(f"//{host}")
        try:
            address = ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._names
        return address.is_loopback or self._any_address or name in self._names

    def are_origin(self, origin: str, host: str) -> bool:
        """Whether an ``Origin`` header is this page's, which was asked for at ``host``."""
        return urlsplit(origin).netloc.lower() == host.lower() or _name_of(origin) in self.allowed


def _name_of(url: str) -> str:
    """The host of a URL in lower case, without its port; nothing where it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    """Whether who listens there is reached from this machine alone."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return host not in WILDCARDS and all(ip_address(where[4][0]).is_loopback for where in found)


class Guard:
    """ASGI middleware: lets through what the page needs, and sends ``POLICY`` with every answer."""

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
                await self._app(scope, _again(body, receive), _with_policy(send))
                return
            refused = _answer(
                scope,
                413,
                f"This is too much to send at once: the limit is {self._largest / 2**20:.3g} MiB. "
                "Shorten the message or start a new chat; “Export all” saves this one.",
            )
        await refused(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is refused by what its head says, or nothing."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.are_asked(host):
            port = (scope.get("server") or ("", 7860))[1]
            name = _name_of(f"//{host}")
            return _answer(
                scope,
                403,
                f"This server does not go by the name {name!r:.80}, so a page of another site may "
                f"be asking. Open http://127.0.0.1:{port} on the machine it runs on, or start it "
                "with --allow-host and the name, if the name is yours.",
            )
        if origin is not None and not self._names.are_origin(origin, host):
            return _answer(
                scope,
                403,
                f"This request comes from a page of {origin!r:.80}, which may ask nothing here. "
                "Open the chat's own address. If a proxy passes the chat on, start it with "
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
        return _answer(scope, 403, "The chat does not need this address, so it is closed.")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request, however it is sent; nothing where it is too long."""
        said = Headers(scope=scope).get("content-length", "0")
        if not said.isdecimal() or int(said) > self._largest:
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
    """A refusal, for people. tab.js shows the JSON in the page, which Gradio's client does not."""
    if status == 413 and Headers(scope=scope).get("content-type") == "application/json":
        return JSONResponse({"error": why, "detail": why}, status)
    return PlainTextResponse(f"{why}\n", status)


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` as it was before the body was read."""
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
