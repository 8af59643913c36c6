"""The server's checks of Host, Origin, routes and request size."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from app.guard import LARGEST_BODY, POLICY, Guard, Names
from app.server import bind, serve
from tests.app.browser.chat import served

EVIL = "evil.example"
JSON = {"Content-Type": "application/json"}
CALL = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"})
FORM = (
    '--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n'
    "Content-Type: text/plain\r\n\r\nkept\r\n--b--\r\n"
)


@pytest.fixture(scope="module")
def port(tiny_model: Path) -> Iterator[int]:
    with served(tiny_model, "--allow-host", "chat.example") as url:
        yield urlsplit(url).port or 0


def ask(
    port: int,
    path: str,
    method: str = "GET",
    body: str | bytes | Iterable[bytes] | None = None,
    **headers: str,
) -> tuple[int, str]:
    """The status, and the text of a plain-text response: a stream has no end."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named, encode_chunked=not isinstance(body, str))
        answer = connection.getresponse()
        is_text = answer.getheader("Content-Type", "").startswith("text/plain")
        return answer.status, answer.read().decode() if is_text else ""
    finally:
        connection.close()


def test_the_page_answers_only_to_its_own_names_and_forbids_requests_to_others(port: int) -> None:
    for path in (
        "/",
        "/config",
        "/gradio_api/queue/data?session_hash=x",
        "/gradio_api/heartbeat/x",
    ):
        status, told = ask(port, path, Host=EVIL)
        assert status == 403
        assert told.startswith("The name 'evil.example' is not one of this server's")
        assert f"Open http://127.0.0.1:{port} " in told
        assert "--allow-host" in told
    with socket.create_connection(("127.0.0.1", port), timeout=60) as websocket:
        websocket.sendall(
            f"GET /gradio_api/queue/data HTTP/1.1\r\nHost: {EVIL}\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert websocket.recv(100).startswith(b"HTTP/1.1 403 ")
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().getheader("Content-Security-Policy") == POLICY
    connection.close()


def test_calls_of_other_sites_are_refused_and_those_of_the_page_are_not(port: int) -> None:
    path = "/gradio_api/queue/join"
    ours = f"localhost:{port}"
    for headers, status in (
        ({"Host": EVIL, "Origin": f"http://{EVIL}"}, 403),
        ({"Host": ours, "Origin": f"http://{EVIL}"}, 403),
        ({"Host": ours, "Origin": f"http://127.0.0.1:{port}"}, 403),  # another site's, to browsers
        ({"Host": ours, "Origin": "null"}, 403),
        ({"Host": ours, "Origin": f"http://{ours}"}, 200),
        ({"Host": ours}, 200),
        ({"Host": "chat.example", "Origin": "https://chat.example"}, 200),
        ({"Host": ours, "Origin": "https://chat.example"}, 200),  # a proxy that names itself so
    ):
        found, told = ask(port, path, "POST", CALL, **JSON, **headers)
        assert found == status, headers
        assert status == 200 or "which has no access here" in told or EVIL in told


def test_routes_that_take_or_give_files_are_closed(port: int) -> None:
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    for path in ("upload", "component_server", "process_recording", "vibe-edit", "api/predict"):
        found = ask(port, f"/gradio_api/{path}", "POST", FORM, **boundary)
        assert found == (403, "This address is closed because the chat does not use it.\n"), path
    assert ask(port, "/login", "POST", "username=a&password=b")[0] == 403
    for path in ("file=/etc/hostname", "file=http://192.0.2.1/", "proxy=http://192.0.2.1/"):
        assert ask(port, f"/gradio_api/{path}")[0] == 403, path


def test_the_size_of_a_body_is_limited_chunked_or_not(port: int) -> None:
    path = "/gradio_api/queue/join"
    long = {"Content-Length": str(LARGEST_BODY + 1)}
    status, told = ask(port, path, "POST", **long)
    assert (status, "the limit is 64 MiB" in told) == (413, True)
    said = CALL.replace('"x"', f'"{"x" * (LARGEST_BODY - 2000)}"')
    assert ask(port, path, "POST", said, **JSON)[0] == 200
    block = b"x" * 2**20
    chunks = [block] * (LARGEST_BODY // 2**20)
    assert ask(port, path, "POST", iter([*chunks, b"x"]), Transfer_Encoding="chunked")[0] == 413


@pytest.mark.parametrize(
    ("listens", "answered", "refused"),
    [
        (
            "127.0.0.1",
            ("127.0.0.1:7860", "127.1.2.3", "[::1]:7860", "LocalHost.:80"),
            ("192.168.0.2:7860", "0.0.0.0:7860", "box", "localhost.evil.example", "", "["),
        ),
        ("::1", ("[::1]:7860",), ()),
        ("0.0.0.0", ("192.168.0.2:7860", "[fe80::1]:7860", "box:7860", "box.local"), (EVIL,)),
        ("::", ("box.lan",), ()),
        ("192.0.2.1", ("192.0.2.1:7860",), ("box",)),
    ],
)
def test_a_server_goes_by_loopback_names_and_by_what_it_listens_on(
    monkeypatch: pytest.MonkeyPatch,
    listens: str,
    answered: tuple[str, ...],
    refused: tuple[str, ...],
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    for asked in (*answered, *refused):
        assert Names(listens).include(asked) is (asked in answered), asked


def guarded(**options: Any) -> TestClient:
    """A server whose every address answers “ok”, behind the guard."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("ok")(scope, receive, send)

    names = Names("127.0.0.1", ["editor.example"])
    guard = Guard(answers, names, endpoint={"/v1/models", "/completion"}, **options)
    return TestClient(guard, base_url="http://127.0.0.1")


def test_with_keys_every_address_but_health_needs_one() -> None:
    client = guarded(keys=("first", "second"))
    password = base64.b64encode(b"anyone:second").decode()
    for headers in (
        {"Authorization": "Bearer first"},
        {"X-Api-Key": "second"},
        {"Authorization": f"Basic {password}"},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/", headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer firs"}, {"Authorization": "Basic %"}):
        refused = client.post("/completion", headers=headers)
        kind = refused.json()["error"]["type"]
        assert (refused.status_code, kind) == (401, "authentication_error")
        page = client.get("/", headers=headers)
        assert (page.status_code, page.headers["www-authenticate"][:5]) == (401, "Basic")
    assert client.get("/health").status_code == 200


def test_a_body_that_is_cut_off_is_not_acted_on() -> None:
    asked: list[bytes] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((await receive())["body"])
        await PlainTextResponse("ok")(scope, receive, send)

    listening = bind("127.0.0.1", 0)
    serve(Guard(answers, Names("127.0.0.1"), endpoint={"/completion"}), listening)
    for framing, body in (
        ("Content-Length: 20", b'{"prompt": "a"}'),  # whole JSON, but not the whole body
        ("Transfer-Encoding: chunked", b'f\r\n{"prompt": "a"}\r\n'),
        ("Content-Length: 15", b'{"prompt": "b"}'),
    ):
        with socket.create_connection(listening.getsockname(), timeout=60) as sent:
            head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}\r\n\r\n"
            sent.sendall(head.encode() + body)
            sent.shutdown(socket.SHUT_WR)
            while sent.recv(1000):  # until the server has noticed, or has answered
                pass
    assert asked == [b'{"prompt": "b"}']


def test_pages_of_an_allowed_origin_may_read_the_answers() -> None:
    client = guarded()
    allowed = {"Origin": "https://editor.example"}
    asked = client.options(
        "/completion", headers={**allowed, "Access-Control-Request-Headers": "Authorization"}
    )
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-headers"] == "Authorization"
    found = client.post("/completion", headers=allowed)
    assert found.headers["access-control-allow-origin"] == "https://editor.example"
    other = client.post("/completion", headers={"Origin": "https://evil.example"})
    assert (other.status_code, other.json()["error"]["code"]) == (403, 403)
    assert "access-control-allow-origin" not in other.headers
    large = guarded(largest=3).post("/completion", content=b"four")
    assert "the limit is" in large.json()["error"]["message"]
