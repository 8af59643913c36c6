"""The server's checks of Host, Origin, routes and request size."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from app import server
from app.guard import LARGEST_BODY, POLICY, Guard, Names
from app.hosts import bind
from app.server import serve
from tests.app.browser.chat import served
from tests.support import fake_endpoint
from tests.support.fake_backend import FakeBackend

EVIL = "evil.example"
JSON = {"Content-Type": "application/json"}
SHOWN = json.dumps({"settings": {}, "section": ""})
CALL = json.dumps({"data": [SHOWN], "fn_index": 0, "session_hash": "x"})
RUN = "/gradio_api/run/predict"
FORM = (
    '--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n'
    "Content-Type: text/plain\r\n\r\nkept\r\n--b--\r\n"
)


@pytest.fixture(scope="module")
def port(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    chats = tmp_path_factory.mktemp("chats") / "chats.db"
    with served(tiny_model, chats, "--allow-host", "chat.example") as (url, _):
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
    for path in ("/page/state", "/page/events", "/", "/config"):
        status, told = ask(port, path, Host=EVIL)
        assert status == 403
        if not path.startswith("/page/"):
            assert told.startswith("The name 'evil.example' is not one of this server's")
            assert f"Open http://127.0.0.1:{port} " in told and "--allow-host" in told
    with socket.create_connection(("127.0.0.1", port), timeout=60) as websocket:
        websocket.sendall(
            f"GET /page/events HTTP/1.1\r\nHost: {EVIL}\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert websocket.recv(100).startswith(b"HTTP/1.1 403 ")
    headers = httpx.get(f"http://127.0.0.1:{port}/").headers
    policy = headers["content-security-policy"]  # with the page's own scripts
    assert re.sub("'sha256-[^']+' ", "", policy) == POLICY
    assert headers["x-content-type-options"] == "nosniff"


def test_calls_of_other_sites_are_refused_and_those_of_the_page_are_not(port: int) -> None:
    ours = f"localhost:{port}"
    for host, origin, status in (
        (EVIL, f"http://{EVIL}", 403),
        (ours, f"http://{EVIL}", 403),
        (ours, f"http://127.0.0.1:{port}", 403),  # another site's, to browsers
        (ours, "null", 403),
        (ours, f"http://{ours}", 200),
        (ours, "", 200),
        ("chat.example", "https://chat.example", 200),
        (ours, "https://chat.example", 200),  # a proxy that names itself so
    ):
        headers = {"Host": host, **({"Origin": origin} if origin else {})}
        found, told = ask(port, RUN, "POST", CALL, **JSON, **headers)
        assert found == status, headers
        assert status == 200 or "which has no access here" in told or EVIL in told


def test_routes_that_the_page_does_not_use_are_closed(port: int) -> None:
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    for path in ("upload", "component_server", "process_recording", "vibe-edit", "api/predict"):
        assert ask(port, f"/gradio_api/{path}", "POST", FORM, **boundary)[0] == 404, path
    assert ask(port, "/login", "POST", "username=a&password=b")[0] == 404
    assert ask(port, "/gradio_api/queue/join", "POST", CALL, **JSON)[0] == 404
    files = "file=/etc/hostname file=http://192.0.2.1/ proxy=http://192.0.2.1/ openapi.json info"
    queue = "queue/status queue/data?session_hash=x heartbeat/x upload_progress?upload_id=x runs"
    for path in f"{files} {queue} deep_link?session_hash=x startup-events".split():
        assert ask(port, f"/gradio_api/{path}")[0] == 404, path
    for path in ("/user", "/monitoring", "/pwa_icon", "/robots.txt", "/docs"):
        assert ask(port, path)[0] == 404, path
    for path in ("/", "/config", "/theme.css"):
        assert ask(port, path)[0] == 200, path
        assert ask(port, path, "PUT")[0] == 404, path
    assert ask(port, "/page/chats", "PUT")[0] == 405


def test_the_size_of_a_body_is_limited_chunked_or_not(port: int) -> None:
    long = {"Content-Length": str(LARGEST_BODY + 1)}
    status, told = ask(port, RUN, "POST", **long)
    assert (status, "the limit is 64 MiB" in told) == (413, True)
    said = CALL.replace('"x"', f'"{"x" * (LARGEST_BODY - 2000)}"')
    assert ask(port, RUN, "POST", said, **JSON)[0] == 400  # it is read, and no page asks for that
    block = b"x" * 2**20
    chunks = [block] * (LARGEST_BODY // 2**20)
    assert ask(port, RUN, "POST", iter([*chunks, b"x"]), Transfer_Encoding="chunked")[0] == 413


@pytest.mark.parametrize(
    ("listens", "answered", "refused"),
    [
        (
            *("127.0.0.1", "127.0.0.1:7860 127.1.2.3 [::1]:7860 LocalHost.:80"),
            "192.168.0.2:7860 0.0.0.0:7860 box localhost.evil.example [",
        ),
        ("::1", "[::1]:7860", ""),
        ("0.0.0.0", "192.168.0.2:7860 [fe80::1]:7860 box:7860 box.local", EVIL),
        ("::", "box.lan", ""),
        ("192.0.2.1", "192.0.2.1:7860", "box"),
    ],
)
def test_a_server_goes_by_loopback_names_and_by_what_it_listens_on(
    monkeypatch: pytest.MonkeyPatch, listens: str, answered: str, refused: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    for asked in (*answered.split(), *refused.split(), ""):
        assert Names(listens).include(asked) is (asked in answered.split()), asked


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every request with what it gets to see."""
    body = (await receive())["body"].decode()
    kind = Headers(scope=scope).get("content-type")
    seen = f"{scope['method']} {scope['path']} {kind} {body}"
    await PlainTextResponse(seen)(scope, receive, send)


def guarded(**options: Any) -> TestClient:
    """A server that echoes every request, behind the guard."""
    guard = Guard(echo, Names("127.0.0.1", ["editor.example"]), **options)
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
    for value in (None, b"Bearer firs", b"Basic %", b"Basic \xe9\xe9\xe9\xe9"):
        given: dict[Any, Any] = {} if value is None else {"Authorization": value}
        refused = client.post("/completion", headers=given)
        kind = refused.json()["error"]["type"]
        assert (refused.status_code, kind) == (401, "authentication_error")
        refused = client.post("/v1/messages", headers=given)  # in Anthropic's form
        told = refused.json()
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
        page = client.get("/", headers=given)
        assert (page.status_code, page.headers["www-authenticate"][:5]) == (401, "Basic")
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["schlüssel", "鍵"])
def test_a_key_may_have_any_characters(key: str) -> None:
    client, sent = guarded(keys=("other", key)), key.encode()
    given: list[dict[Any, Any]] = [
        {"Authorization": b"Bearer " + sent},
        {"X-Api-Key": sent},
        {"Authorization": b"Basic " + base64.b64encode(b"anyone:" + sent)},
    ]
    if "ü" in key:
        given.append({"X-Api-Key": key.encode("latin-1")})
    for headers in given:
        assert client.get("/v1/models", headers=headers).status_code == 200
    wrong: dict[Any, Any] = {"X-Api-Key": sent[:-1]}
    assert client.get("/v1/models", headers=wrong).status_code == 401


def test_a_body_that_is_cut_off_is_not_acted_on() -> None:
    asked: list[bytes] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((await receive())["body"])
        await PlainTextResponse("ok")(scope, receive, send)

    listening = bind("127.0.0.1", 0)
    serve(Guard(answers, Names("127.0.0.1")), listening)
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


def test_bodies_that_are_being_sent_have_a_limit_in_all() -> None:
    answered: list[int] = []

    async def send(message: Any) -> None:
        answered.extend([message["status"]] if "status" in message else [])

    async def all_at_once() -> None:
        guard = Guard(PlainTextResponse("ok"), Names("127.0.0.1"), largest=100)
        go_on = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/completion", "query_string": b""}
        scope["headers"] = [(b"host", b"127.0.0.1")]

        def client() -> asyncio.Task[None]:
            messages = iter([100, 0])

            async def receive() -> Any:
                if not (n := next(messages)):
                    await go_on.wait()
                return {"type": "http.request", "body": b"x" * n, "more_body": n > 0}

            return asyncio.ensure_future(guard(scope, receive, send))

        slow = [client() for _ in range(8)]
        await client()
        assert answered == [503]
        go_on.set()
        await asyncio.gather(*slow, client())

    asyncio.run(all_at_once())
    assert answered == [503] + [200] * 9


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


@pytest.mark.parametrize(
    ("allowed", "admitted", "refused"),
    [
        (
            "https://app.example",
            "https://app.example https://app.example:8443 HTTPS://App.example",
            "http://app.example https://an.app.example https://app.example.evil.example",
        ),
        ("http://app.example:3000/", "http://app.example:3000", "http://app.example"),
        (
            *("chrome-extension://*", "chrome-extension://fjkmabmdepjfammlpliljpnbhleegehm"),
            "moz-extension://fjkmabmdepjfammlpliljpnbhleegehm https://chrome-extension",
        ),
        (
            *("app.example:8080", "https://app.example http://app.example:3000"),
            "https://app-example https://an.app.example",
        ),
        ("*.corp.example", "https://a.corp.example", "https://corp.example https://acorp.example"),
    ],
)
def test_origins_are_allowed_by_name_by_origin_and_by_pattern(
    allowed: str, admitted: str, refused: str
) -> None:
    names = Names("127.0.0.1", [allowed])
    for origin in f"{admitted} {refused}".split():
        assert names.allow_origin(origin, True) is (origin in admitted.split()), origin
    # An origin with a pattern does not make names of this server: any site could have one.
    assert Names("127.0.0.1", ["https://app.example"]).include("app.example:443")
    assert not Names("127.0.0.1", ["https://*", "x-extension://*"]).include(EVIL)


def test_pages_of_this_machine_may_use_the_endpoint_but_not_the_page() -> None:
    client = guarded()
    for origin in ("http://localhost:3000", "https://127.0.0.1:9000", "http://[::1]:5173"):
        found = client.post("/completion", headers={"Origin": origin})
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == origin
        assert client.get("/config", headers={"Origin": origin}).status_code == 403
    for origin in (
        "http://notlocalhost",
        "http://localhost.evil.example",
        "null",
        "http://[",
        "::",
    ):
        found = client.post("/completion", headers={"Origin": origin})
        assert found.status_code == 403, origin
        assert f"--allow-host {origin}." in found.json()["error"]["message"]
        asked = client.options("/completion", headers={"Origin": origin})
        assert asked.status_code == 200
        assert "access-control-allow-origin" not in asked.headers
    extension = {"Origin": "moz-extension://0b7c1a52-8f0e-4f6c-9d1b-2f3a4b5c6d7e"}
    told = client.post("/completion", headers=extension).json()["error"]["message"]
    assert "--allow-host 'moz-extension://*'." in told


def test_what_another_site_can_ask_for_without_an_origin_reaches_no_chat() -> None:
    client = guarded()
    hub = "/page/models/hub"
    for path, site, origin, status in (
        (hub, "cross-site", None, 403),
        (hub, "same-site", None, 403),  # another port of this machine
        (f"http://127.0.0.1/{hub}", "cross-site", None, 403),
        (hub, "same-origin", None, 200),
        (hub, "none", None, 200),  # typed by the user
        (hub, "cross-site", "https://editor.example", 200),
        ("/", "cross-site", None, 200),  # a link to the page
        ("/assets/a.js", "same-site", None, 200),
        ("/v1/models", "cross-site", None, 200),
    ):
        headers = {"Sec-Fetch-Site": site, **({"Origin": origin} if origin else {})}
        assert client.get(path, headers=headers).status_code == status, (path, site)


def test_a_compressed_body_is_refused_with_the_reason() -> None:
    client = guarded()
    for path, kind in (("/completion", "gzip"), ("/v1/models", "zstd"), ("/page/models/hub", "br")):
        found = client.post(path, content=b"x", headers={"Content-Encoding": kind})
        assert found.status_code == 415
        assert "reads no compressed bodies" in found.json()["error"]["message"]
    plain = client.post("/completion", content=b"{}", headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


def test_a_request_is_taken_as_its_client_meant_it() -> None:
    client = guarded()
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl -d
    root = "http://127.0.0.1"
    for path in (f"{root}/completion", f"{root}//completion", f"{root}/completion/"):
        for headers in (form, {"Content-Type": "text/plain"}, {}):
            found = client.post(path, content=b"{}", headers=headers)
            assert found.text == "POST /completion application/json {}"
    assert client.get(f"{root}//v1///models/").text.startswith("GET /v1/models ")
    head = client.head("/v1/models")
    assert (head.status_code, head.text) == (200, "")


def test_addresses_and_methods_that_there_are_not_are_told_in_json() -> None:
    client = fake_endpoint.client(FakeBackend())
    for method, path, allowed in (
        ("GET", "/completion", "POST"),
        ("HEAD", "/completion", "POST"),
        ("PUT", "/v1/models", "GET"),
        ("POST", "/v1/responses/one", "DELETE, GET"),
    ):
        found = client.request(method, path)
        assert (found.status_code, found.headers["allow"]) == (405, allowed)
    told = "/v1/responses/a takes DELETE, GET, not POST."
    error = {"message": told, "type": "invalid_request_error", "param": None, "code": 405}
    assert client.post("/v1/responses/a").json() == {"error": error}
    for method in ("GET", "POST", "DELETE"):
        for path in ("/v1/model", "/config", "/gradio_api/run/predict"):
            found = client.request(method, path)
            assert found.status_code == 404
            assert found.json()["error"]["type"] == "not_found_error"
            assert "docs/endpoint.md lists its addresses" in found.json()["error"]["message"]
    assert client.options("/v1/models").status_code == 200
    assert client.get("/").json() == {"endpoint": "/v1"}


def test_idle_connections_give_way_to_those_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    listening = bind("127.0.0.1", 0)
    assert listening.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on
    serve(Guard(echo, Names("127.0.0.1")), listening)
    idle = [socket.create_connection(listening.getsockname(), timeout=60) for _ in range(12)]
    for each in idle[::2]:
        each.sendall(b"GET / HTTP/1.1\r\nHost: ")  # and no more
    assert ask(listening.getsockname()[1], "/") == (200, "GET / application/json ")
    for each in idle[:9]:  # the oldest
        with suppress(ConnectionResetError):
            assert each.recv(1) == b""
    for each in idle:
        each.close()
