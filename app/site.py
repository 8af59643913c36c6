"""What the server serves: the endpoint, and the page if there is a store for its chats."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.api.log import RequestLog
from app.api.service import Service
from app.api.switching import Models
from app.mcp.routes import add_route
from app.mcp.servers import Servers
from app.page import models as page_models
from app.page.chats import Chats
from app.page.owners import Owners
from app.page.routes import add_routes
from app.server import endpoint, guard, serve
from app.store import Store, default_file
from app.worker.backend import Backend


def serve_site(
    listening: socket.socket,
    backend: Backend,
    flags: argparse.Namespace,
    store: Store | None,
    *,
    method: str,
    is_one: bool,
) -> Callable[[], object]:
    """Start the server; returns what saves the chats at its end.

    ``method`` is the endpoint's where a request names none; ``is_one``: only one person can use
    the server.
    """
    models = Models(
        backend,
        flags.spec,
        alias=flags.alias,
        switches=flags.switch_models,
        idle_seconds=flags.unload_after,
    )
    service = Service(
        backend, flags.alias, flags.sampling, method, flags.max_tokens, flags.timeout, models
    )
    app = endpoint(service)
    # Not beside another file of chats: it names commands, and who knows what else is there?
    servers = Servers(default_file().with_name("mcp.json"))
    add_route(app, servers, is_one=is_one)
    chats = None if store is None else Chats(backend, store, servers)
    if chats is not None:
        add_routes(app, chats, Owners(is_one=is_one))
        page_models.add_routes(app, chats, flags.spec)
        with _without_proxies():
            from app.page.ui import build, mount  # Gradio takes seconds to import

            mount(app, build(backend, flags.method, flags.spec.model))
    allowed = flags.allow_host or ()
    guarded = guard(app, flags.host, allowed, flags.api_key, page=chats is not None)
    serve(RequestLog(guarded), listening)
    return chats.close if chats is not None else servers.close


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Gradio makes clients of the network when it is imported, which fails with a SOCKS proxy. The
    page asks nobody."""
    before = os.environ.get("no_proxy")
    os.environ["no_proxy"] = "*"
    try:
        yield
    finally:
        del os.environ["no_proxy"]
        if before is not None:
            os.environ["no_proxy"] = before
