"""ASGI middleware that protects the server: Host, Origin, API keys and request size.

Other sites must not reach this server through the user's browser. ``Host`` must be a name of this
server, or a site could point its own name here (DNS rebinding). ``Origin``, if sent, must be this
server's or allowed; for the endpoint, one of this machine's will do, but not for the page and its
chats, which no image or link of another site may ask for either. Request bodies are limited.
"""

from __future__ import annotations

import base64
import hmac
import re
import socket
from collections.abc import Collection, Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.answers import as_json
from app.api.errors import error_body_for
from app.hosts import WILDCARDS, address_of, is_loopback, name_of

# What a browser allows a page from here: nothing of other servers, and no script that is not this
# server's. Gradio makes functions of what its configuration says, hence 'unsafe-eval'; the document
# adds the hashes of its own scripts (app/page/ui.py).
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'self'"
)

# An import has many chats; a message at most 1 MB of text or a PDF of 20 MB, in base64.
LARGEST_BODY = 64 * 2**20  # bytes
MOST_AT_ONCE = 8  # bodies of that size that are being sent

CHATS = "/page/"  # the page's own routes
# Of Gradio's routes, those that the page uses.
POSTS = ("/gradio_api/run/predict",)
PAGE = re.compile(rf"/|/config|/theme\.css|/favicon\.ico|/(assets|static|svelte)/.+|{POSTS[0]}")
PUBLIC = ("/health", "/v1/health")  # need no key

# As browsers call them. A request that is no ``POST`` may have no ``Origin``.
OTHER_SITES = ("cross-site", "same-site")


class Names:
    """The host names of this server, and the origins whose pages may use it."""

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """``host`` is the address to listen on. ``allowed`` are further names, and origins such as
        ``https://app.example``; ``*`` in them stands for any part of a name.

        Unless the server listens on loopback only, any IP address is accepted: DNS rebinding needs
        a name. So this machine's addresses need not be known; in a container they are not.
        """
        host = host.strip("[]").lower()
        given = [name.lower().rstrip("/") for name in allowed]
        origins = [name for name in given if "://" in name]
        self._origins = [_pattern(one, r"(:\d+)?") for one in origins]
        self._allowed = [_pattern(name_of(name)) for name in given if "://" not in name]
        # A proxy's origin is its name, too. With *, any site could point a name of its own here.
        proxies = [one for one in origins if one.startswith("http") and "*" not in one]
        own = {host, *map(name_of, proxies)}
        if host in WILDCARDS:
            name = socket.gethostname().lower()
            own |= {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
        self._names = own - set(WILDCARDS)
        self._any_address = not is_loopback(host)

    def include(self, host: str) -> bool:
        """Whether a ``Host`` header, with or without a port, is one of these names."""
        name = name_of(host).rstrip(".")
        if is_loopback(name) or name in self._names or _matches(name, self._allowed):
            return True
        return self._any_address and address_of(name) is not None

    def allow_origin(self, origin: str, is_endpoint: bool) -> bool:
        """Whether an ``Origin`` is one of the further names, or of this machine if the request is
        for the endpoint."""
        name = name_of(origin)
        if _matches(origin.lower(), self._origins) or _matches(name, self._allowed):
            return True
        return is_endpoint and is_loopback(name)


def _pattern(text: str, end: str = "") -> re.Pattern[str]:
    """What a name or an origin with ``*`` in it matches."""
    return re.compile(re.escape(text).replace(r"\*", "[^/]*") + end)


def _matches(text: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(text) for pattern in patterns)


class Guard:
    """ASGI middleware: passes what page and endpoint need, and adds ``POLICY`` to every response.

    With ``keys``, a request needs one of them: as a bearer token, as ``X-Api-Key``, or as the
    password of a browser that asks for it. If there are several, the app finds it in the scope's
    ``api_key``.

    Double slashes, a slash at the end and any content type are tolerated: all bodies are JSON.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Names,
        keys: Collection[str] = (),
        largest: int = LARGEST_BODY,
        *,
        page: bool = True,
    ) -> None:
        """``page``: whether ``app`` has the page, too."""
        self._app = app
        self._names = names
        self._keys = keys
        self._largest = largest
        self._n_bytes = 0  # of bodies that are being sent
        self._has_page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": re.sub("/+", "/", scope["path"]).rstrip("/") or "/"}
        send = _with_headers(send, self._cors(scope))
        try:
            self._check(scope)
            body = await self._read(scope, receive)
        except ClientDisconnect:
            return  # what came of the body may look like a whole one
        except HTTPException as refused:
            await self._answer(scope["path"], refused)(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":  # without headers that allow it, a browser asks no further
            await Response()(scope, receive, send)
            return
        await self._app(_for_app(scope), _replayed(body, receive), send)

    def _cors(self, scope: Scope) -> dict[str, str]:
        """Headers that let a browser give the answer to a page of another, allowed origin."""
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        if not origin or not self._names.allow_origin(origin, self._is_endpoint(scope["path"])):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
            "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
            "Vary": "Origin",
        }

    def _check(self, scope: Scope) -> None:
        """Raise HTTPException if the request is refused because of its headers or its path."""
        headers, path = Headers(scope=scope), scope["path"]
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.include(host):
            port = (scope.get("server") or ("", 7860))[1]
            name = name_of(host)
            raise HTTPException(
                403,
                f"The name {name!r:.80} is not one of this server's; another site may be behind "
                f"this request. Open http://127.0.0.1:{port} on the machine that runs the server. "
                f"If the name is yours, start the server with --allow-host {name or 'NAME':.80}.",
            )
        if scope["method"] == "OPTIONS":
            return
        if origin is not None and not (
            origin.partition("://")[2].lower() == host.lower()
            or self._names.allow_origin(origin, self._is_endpoint(path))
        ):
            raise HTTPException(
                403,
                f"This request comes from a page of {origin!r:.80}, which has no access here. Open "
                "the chat's own address. If you trust that page, or it is that of a proxy in front "
                f"of this server, start the server with --allow-host {_flag_for(origin)}.",
            )
        is_other = headers.get("sec-fetch-site") in OTHER_SITES and origin is None
        if is_other and path.startswith((CHATS, "/v1/tools")):
            raise HTTPException(
                403, "A page of another site made this request; open the chat's own address."
            )
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(
                415, "This server reads no compressed bodies; send the body as it is."
            )
        key = self._key(headers)
        scope["api_key"] = key if len(self._keys) > 1 else None
        if self._keys and key is None and path not in PUBLIC:
            asks = {"WWW-Authenticate": 'Basic realm="the API key as the password"'}
            raise HTTPException(
                401,
                "This server needs its API key: send it as “Authorization: Bearer KEY”.",
                None if self._is_endpoint(path) else asks,
            )

    def _is_endpoint(self, path: str) -> bool:
        return not (self._is_page(path) or path.startswith(CHATS))

    def _is_page(self, path: str) -> bool:
        """Whether Gradio serves it."""
        return self._has_page and PAGE.fullmatch(path) is not None

    def _key(self, headers: Headers) -> str | None:
        """The one of the keys that a request has."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        text = headers.get("x-api-key", value if kind.lower() == "bearer" else "")
        given = text.encode("latin-1")  # as which Starlette reads headers
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(value).partition(b":")[2]
            except ValueError:
                return None
        either = given, given.decode("latin-1").encode()  # clients write UTF-8 or Latin-1
        for key in self._keys:
            if any(hmac.compare_digest(one, key.encode()) for one in either):
                return key
        return None

    def _answer(self, path: str, refused: HTTPException) -> Response:
        """A refusal with its reason."""
        status, why, headers = refused.status_code, refused.detail, refused.headers
        if self._is_page(path):
            return PlainTextResponse(f"{why}\n", status, headers)
        return as_json(error_body_for(path, why, status), status, headers)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request, chunked or not.

        Raises HTTPException if it is too large, or if too much is being sent already,
        ClientDisconnect if the client leaves before it has sent all of it.
        """
        limit = f"{self._largest / 2**20:.3g} MiB"
        too_large = HTTPException(
            413, f"This is too much to send at once: the limit is {limit}. Send less, or in parts."
        )
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self._largest:
            raise too_large
        parts, n_bytes = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                n_bytes += len(parts[-1])
                self._n_bytes += len(parts[-1])
                if n_bytes > self._largest:
                    raise too_large
                if self._n_bytes > MOST_AT_ONCE * self._largest:
                    why = "Too many large requests are being sent to this server; try again soon."
                    raise HTTPException(503, why)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            self._n_bytes -= n_bytes


class Page(Mount):
    """Gradio with the routes that the page uses. Files, uploads, deep links and more are closed."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        method = "POST" if scope["path"] in POSTS else "GET"
        is_open = PAGE.fullmatch(scope["path"]) is not None and scope.get("method") == method
        return super().matches(scope) if is_open else (Match.NONE, {})


def _flag_for(origin: str) -> str:
    """What ``--allow-host`` takes for an origin. An extension's id differs between machines."""
    scheme = origin.partition("://")[0]
    return f"'{scheme}://*'" if scheme.endswith("-extension") else f"{origin:.80}"


def _for_app(scope: Scope) -> Scope:
    """The request as the app's routes take it: every body is JSON, whatever its header says
    (curl's says it is a form), and HEAD is GET, whose body the server leaves out."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {
        **scope,
        "method": method,
        "headers": [*headers, (b"content-type", b"application/json")],
    }


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that yields the body again."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _with_headers(send: Send, more: Mapping[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("content-security-policy", POLICY)
            headers["x-content-type-options"] = "nosniff"
            headers.update(more)
        await send(message)

    return send_with_headers
