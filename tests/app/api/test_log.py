"""What the server prints of its requests."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from app.api import log
from app.api.log import RequestLog
from app.api.service import Service
from app.server import endpoint, guard
from app.worker.messages import Event, Failed, Prefill, Tokens
from tests.support.fake_backend import DONE, FakeBackend

READ = [Prefill(0, 227), Prefill(100, 227), Prefill(227, 227)]
TEXT = [Tokens((("a secret", False),), (1,))]
SHORT = replace(DONE, n_tokens=2, n_first=2, n_drafted=0, n_accepted=0, n_reused=200)


@pytest.mark.parametrize(
    ("path", "body", "events", "lines"),
    [
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": "a secret"}]},
            [*TEXT, DONE],
            [
                "POST /v1/chat/completions 200: 228 prompt tokens, 0 cached, read at 912.0/s; "
                "first token after S; 84 tokens at 83.0/s, 52% drafted; stop"
            ],
        ),
        (
            "v1/messages",
            {
                "messages": [{"role": "user", "content": "a secret"}],
                "stream": True,
                "max_tokens": 9,
            },
            [*READ, *TEXT, replace(SHORT, finish_reason="length")],
            [
                "POST /v1/messages: 100 of 228 prompt tokens read (43%)",
                "POST /v1/messages 200: 228 prompt tokens, 200 cached, read at 112.0/s; "
                "first token after S; 2 tokens at 1.0/s, 0% drafted; length",
            ],
        ),
        (
            "v1/responses",
            {"input": "a secret"},
            [Failed("a secret is wrong", kind="invalid")],
            ["POST /v1/responses 400: S; failed: invalid"],
        ),
        ("completion", {"prompt": {"a secret": 1}}, [], ["POST /completion 400: S"]),
        ("%1b%0asecret", {}, [], ["POST /%1b%0asecret 404: S"]),
    ],
)
def test_a_line_for_each_request_tells_its_figures_and_its_end_but_not_its_text(
    path: str,
    body: dict[str, object],
    events: list[Event],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(log, "perf_counter", lambda: float(next(seconds)))
    app = RequestLog(guard(endpoint(Service(FakeBackend(events))), "127.0.0.1"))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.post(path, json=body)
        client.get("health")
        client.get("page/nothing")
    told = capsys.readouterr().err
    assert re.sub(r"(?<=: )[\d.]+ s|(?<=after )-?[\d.]+ s", "S", told).splitlines() == lines
