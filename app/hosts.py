"""Host names, and the socket to listen on. Quick to import: it comes before the engine starts."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

PORTS = range(7860, 7960)  # tried in turn
QUEUE = 1024  # connections that the system keeps until they are accepted
WILDCARDS = ("0.0.0.0", "::", "")


def name_of(text: str) -> str:
    """The host of a URL, an origin or a ``Host`` header, in lower case and without the port; empty
    if there is none."""
    try:
        return urlsplit(text if "://" in text else f"//{text}").hostname or ""
    except ValueError:
        return ""


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a host name or address means the machine that uses it."""
    address = address_of(name.strip("[]"))
    return name.lower() == "localhost" if address is None else address.is_loopback


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; None = the first free port of ``PORTS``.

    Raises OSError if there is none.
    """
    host = host.strip("[]")
    family = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0][0]
    failure: OSError | None = None
    for wanted in PORTS if port is None else (port,):
        # asyncio switches off Nagle's algorithm, which holds back an answer for 40 ms, only on
        # sockets that name their protocol.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            listening.listen(QUEUE)
            return listening
        except OSError as error:
            listening.close()
            failure = error
    raise failure or OSError("no port is free")


def address(host: str, listening: socket.socket) -> str:
    """The URL under which a browser on this machine finds the server."""
    name = "localhost" if host in WILDCARDS else host
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"http://{name}:{listening.getsockname()[1]}/"
