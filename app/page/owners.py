"""Whose chats a request is for."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

from fastapi import Depends, Request, Response

from app.api.errors import ApiError
from app.api.service import memory_of
from app.hosts import is_loopback

COOKIE = "speculation"
STRANGER = (
    "This server has no API key, so only its own machine may load files by their path, download "
    "models, look at the Hub or use tools. Start it with --api-key-file to allow it with a key."
)
_SECONDS = 400 * 24 * 3600  # browsers keep a cookie no longer


class Owners:
    """Finds the owner of a request.

    If only one person can use the server, that is "" and needs no cookie: every browser shows the
    same chats. With several API keys it is the key's hash, else that of a cookie.
    """

    def __init__(self, *, is_one: bool) -> None:
        self._is_one = is_one

    def of(self, http: Request) -> str:
        """Raises ApiError for a browser that has no cookie yet."""
        if self._is_one:
            return ""
        cookie = http.cookies.get(COOKIE)
        if not memory_of(http) and not cookie:
            raise ApiError(
                "This browser has no cookie of this server yet. Ask for /page/state first, and "
                "send the cookie that comes with the answer.",
                403,
            )
        return memory_of(http) or _hash(str(cookie))

    def ensure_cookie(self, http: Request, response: Response) -> str:
        """The same for a page that is being loaded, which gets a cookie if it needs one."""
        if self._is_one or memory_of(http) or http.cookies.get(COOKIE):
            return self.of(http)
        made = secrets.token_urlsafe(24)
        response.set_cookie(COOKIE, made, _SECONDS, httponly=True, samesite="strict")
        return _hash(made)


def is_from_here(http: Request) -> bool:
    """Whether a request comes from the server's own machine."""
    host = http.client.host.removeprefix("::ffff:") if http.client is not None else ""
    return is_loopback(host)


def is_trusted(http: Request, owner: str) -> bool:
    """Whether this is no stranger: somebody without a key, on another machine, where others than
    one person can use the server."""
    return not owner or bool(memory_of(http)) or is_from_here(http)


def owner_of(http: Request) -> str:
    owners: Owners = http.app.state.owners
    return owners.of(http)


Owner = Annotated[str, Depends(owner_of)]


def require_trusted(http: Request, owner: Owner) -> None:
    """Raise ApiError (403) for a stranger."""
    if not is_trusted(http, owner):
        raise ApiError(STRANGER, 403)


Trusted = Depends(require_trusted)  # of a route that is not for strangers


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
