"""A minimal Hugging Face Hub on 127.0.0.1 that can serve a file download.

Two servers on two ports, as the real one has two hosts: the hub answers ``/resolve/`` with the
headers that name commit, size and SHA-256 and redirects to a store, which has the bytes and
understands Range. A test sets what goes wrong (``drop_after``, ``wrong_bytes``, ``status``,
``gated``) and reads ``requests`` afterwards.

    with HubServer() as hub:
        hub.add("owner/repo", "model.gguf", b"...")
        hub.drop_after = [1000]              # the first GET of bytes ends after 1000 of them
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "c0ff"  # 40 hexadecimal digits

_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_STORED = re.compile(r"/stored/(?P<sha256>[0-9a-f]{64})")
_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")


@dataclass(frozen=True)
class Request:
    """One request for a file. ``host`` is ``hub`` or ``store``."""

    host: str
    method: str
    path: str
    range: str | None
    authorization: str | None


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()  # repositories that need a token
        self.revisions = {"main", COMMIT}
        self.drop_after: list[int] = []  # one entry per GET of bytes, used in order
        self.wrong_bytes = 0  # GETs of bytes whose first byte is altered
        self.status: list[int] = []  # one entry per GET of bytes, sent instead of bytes
        self.ranges = True  # False: a Range is ignored and the whole file sent
        self.held: threading.Event | None = None  # a GET sends half, then waits for this
        self.missing = 0  # bytes that a file lacks at its end
        self.checksums = True  # False: the ETag is no SHA-256
        self.requests: list[Request] = []
        self._servers = {name: self._start(name) for name in ("hub", "store")}

    @property
    def url(self) -> str:
        return self._address("hub")

    def add(self, repo: str, path: str, content: bytes) -> None:
        self.repos.setdefault(repo, {})[path] = content

    def byte_requests(self) -> list[Request]:
        """The requests that asked for the bytes of a file, in order."""
        return [r for r in self.requests if r.host == "store" and r.method == "GET"]

    def stop(self) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, name: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"owner": self, "host": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def _address(self, name: str) -> str:
        return f"http://127.0.0.1:{self._servers[name].server_address[1]}"


def use_hub(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask ``server`` and keep its files in ``cache``. It reads its environment
    on import: this sets its values."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: HubServer
    host: str

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _answer(self) -> None:
        authorization = self.headers.get("Authorization")
        path = unquote(urlsplit(self.path).path)
        request = Request(self.host, self.command, path, self.headers.get("Range"), authorization)
        if not path.startswith("/api/"):  # other requests of the client are not recorded
            self.owner.requests.append(request)
        if self.host == "store" and (found := _STORED.fullmatch(path)):
            self._store(found["sha256"])
        elif self.host == "hub" and (found := _RESOLVE.fullmatch(path)):
            self._resolve(found["repo"], found["revision"], found["path"])
        elif self.host == "hub" and (found := _MODEL.fullmatch(path)):
            self._model(found["repo"])
        else:
            self._error(404, "EntryNotFound")

    def _refused(self, repo: str) -> bool:
        if repo not in self.owner.repos:
            # The hub's answer for unknown and private repositories alike.
            self._error(401, "RepoNotFound")
            return True
        if repo in self.owner.gated and self.headers.get("Authorization") is None:
            self._error(401, "GatedRepo")
            return True
        return False

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        if self._refused(repo):
            return
        if revision not in self.owner.revisions:
            self._error(404, "RevisionNotFound")
            return
        content = self.owner.repos[repo].get(path)
        if content is None:
            self._error(404, "EntryNotFound")
            return
        sha256 = hashlib.sha256(content).hexdigest()
        self.send_response(302)
        self.send_header("Location", f"{self.owner._address('store')}/stored/{sha256}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content) + self.owner.missing))
        self.send_header("X-Linked-Etag", f'"{sha256 if self.owner.checksums else "v1"}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _model(self, repo: str) -> None:
        if self._refused(repo):
            return
        content = self.owner.repos[repo]
        files = [{"rfilename": path, "size": len(data)} for path, data in content.items()]
        self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode())

    def _store(self, sha256: str) -> None:
        known = (content for files in self.owner.repos.values() for content in files.values())
        content = next((c for c in known if hashlib.sha256(c).hexdigest() == sha256), None)
        if content is None:
            self._error(404, "EntryNotFound")
            return
        if self.command == "GET" and self.owner.status:
            self._error(self.owner.status.pop(0), None)
            return
        if self.command == "GET" and self.owner.wrong_bytes:
            self.owner.wrong_bytes -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        start, asked = 0, self.headers.get("Range")
        if asked is not None and self.owner.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(206, content[start:], {"Content-Range": span, "ETag": f'"{sha256}"'})
        else:
            self._send(200, content, {"Accept-Ranges": "bytes", "ETag": f'"{sha256}"'})

    def _error(self, status: int, code: str | None) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "GET":
            return
        if self.host == "store" and status < 300 and self.owner.drop_after:
            self._write(body[: self.owner.drop_after.pop(0)])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif self.host == "store" and status < 300 and self.owner.held is not None:
            held, half = self.owner.held, len(body) // 2
            self._write(body[:half])
            held.wait(30)
            self._write(body[half:])
        else:
            self._write(body)

    def _write(self, body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the client may disconnect too
            self.wfile.write(body)
