"""What is too much is refused before any work, and one call does not fill the queue."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.api.replies import Replies
from app.api.service import Service
from app.server import endpoint, guard
from app.worker.events import Events
from app.worker.messages import (
    Answer,
    ChatRequest,
    ModelFacts,
    Question,
    Status,
    Tokenize,
)
from tests.app.api.test_replies import client, finished
from tests.support.fake_backend import DONE, MODEL, FakeBackend, Recording, played

HELLO = {"role": "user", "content": "hi"}
EMPTY = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
MARKS = {"prefix": 1, "suffix": 2, "middle": 3}
CHAT, TEXT = "/v1/chat/completions", "/completion"


def counted(n: int, item: Any = "x") -> list[Any]:
    return [item] * n


class Sized(Recording):
    """A model whose longest token has ``longest`` bytes."""

    def __init__(self, longest: int, n_ctx: int) -> None:
        super().__init__()
        self.longest, self.n_ctx = longest, n_ctx

    def status(self) -> Status:
        facts = ModelFacts(n_vocab=100, longest=self.longest, fim=MARKS)
        return Status(replace(MODEL, n_ctx=self.n_ctx), facts=facts)

    def ask(self, question: Question) -> Events:
        assert isinstance(question, Tokenize)
        return played([Answer(tokens=tuple((1, b"x") for _ in question.text))])


@pytest.mark.parametrize(
    ("path", "given", "most", "reason"),
    [
        (CHAT, lambda n: {"messages": counted(n, HELLO)}, 2**14, "messages: List .*at most 16384"),
        (CHAT, lambda n: {"stop": counted(n)}, 128, "stop: List .*at most 128 items"),
        (CHAT, lambda n: {"stop": "x" * n}, 500, r"stop\[0\]: String .*at most 500 characters"),
        (TEXT, lambda n: {"dry_sequence_breakers": counted(n)}, 16, "breakers has 17 .*at most 16"),
        (
            TEXT,
            lambda n: {"logit_bias": {str(i): 1 for i in range(n)}},
            1024,
            "logit_bias.*at most 1024 items",
        ),
        (TEXT, lambda n: {"logit_bias": [["x" * n, 1]]}, 500, "a text of 501 characters; .*500"),
        (TEXT, lambda n: {"logit_bias": counted(n, [1, 2])}, 1024, "bias.*at most 1024 items"),
        (TEXT, lambda n: {"prompt": counted(n)}, 512, "asks for 513 texts; ask for at most 512"),
        (
            TEXT,
            lambda n: {"prompt": counted(8), "n": n},
            64,
            "n: Input .*less than or equal",
        ),
        (
            TEXT,
            lambda n: {"prompt": counted(16), "n": n},
            32,
            "528 texts; ask for at most 512",
        ),
        (TEXT, lambda n: {"prompt": "x" * 10 * n}, 2048, "at least 2049 tokens, .*2048; shorten"),
        (CHAT, lambda n: {"messages": counted(n, EMPTY)}, 2048, "at least 2049 tokens"),
        (
            TEXT,
            lambda n: {"prompt": counted(n, 7)},
            2048,
            "at least 2049 tokens, .*2048; shorten it$",
        ),
        (CHAT, lambda n: {"prediction": {"content": "x" * 10 * n}}, 2048, "at least 2049 tokens"),
        (
            CHAT,
            lambda n: {"messages": [{**HELLO, "content": "x" * (10 * n - 4)}]},
            2048,
            "at least 2049 tokens, .*2048",
        ),
        (
            CHAT,
            lambda n: {
                "messages": [{**HELLO, "content": counted(n, {"type": "text", "text": ""})}]
            },
            1024,
            "a message has 1025 parts; give at most 1024",
        ),
        ("/infill", lambda n: {"input_extra": counted(n, {"text": ""})}, 256, "extra.*at most 256"),
        ("/tokenize", lambda n: {"content": "x" * n}, 2**20, "content: String .*1048576"),
        (
            "/tokenize",
            lambda n: {"content": "x" * n, "with_pieces": True},
            2**18,
            "with_pieces takes at most 262144 characters",
        ),
    ],
)
def test_what_is_too_much_is_refused_with_the_limit(
    path: str, given: Callable[[int], dict[str, Any]], most: int, reason: str
) -> None:
    backend = Sized(10, 2048 if most == 2048 else 2**20)
    with client(backend) as http:
        body = {"messages": [HELLO], "prompt": "hi", "input_prefix": "x"}
        assert http.post(path, json={**body, **given(most)}).status_code == 200
        n_before = len(backend.requests)
        refused = http.post(path, json={**body, **given(most + 1)})
        assert refused.status_code == 400
        assert re.search(reason, refused.json()["error"]["message"])
        assert len(backend.requests) == n_before


def test_a_body_of_millions_of_values_is_not_read() -> None:
    with client(Sized(10, 2**20)) as http:
        for item in ("[]", "{}", "1", '"a"'):
            body = f'{{"prompt": [{",".join([item] * 1_310_720)}]}}'
            refused = http.post(TEXT, content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 413
            assert "commas and brackets; send at most 1,310,720" in refused.text
        allowed = http.post(TEXT, json={"prompt": "a,[{" * 100_000})
        assert allowed.status_code == 200


class Queue(FakeBackend):
    """A backend whose replies end when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Events] = []

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        self.left.append(Events(lambda: None))
        return self.left[-1]


def test_the_requests_of_a_call_enter_the_queue_a_few_at_a_time() -> None:
    async def numbers() -> list[int]:
        backend, found = Queue(), []
        requests = [ChatRequest(str(i)) for i in range(10)]
        work = asyncio.ensure_future(finished(Replies(backend, requests, 100, at_a_time=3)))
        while not work.done():
            await asyncio.sleep(0.01)
            found.append(len(backend.requests))
            if backend.left:
                backend.left.pop(0).put(DONE)
        assert [request.id for request in backend.requests] == [str(i) for i in range(10)]
        assert len(work.result()) == 10
        return found

    assert asyncio.run(numbers())[:10] == [3, 4, 5, 6, 7, 8, 9, 10, 10, 10]


def test_a_call_that_has_ended_sends_no_more_requests() -> None:
    async def n_sent() -> int:
        backend = Queue()
        replies = Replies(backend, [ChatRequest(str(i)) for i in range(10)], 100, at_a_time=3)
        work = asyncio.ensure_future(finished(replies))
        await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])
        for events in backend.left:
            events.put(DONE)
        await asyncio.sleep(0.01)
        return len(backend.requests)

    assert asyncio.run(n_sent()) == 3


class Silent(FakeBackend):
    """A model with marks to fill in the middle, whose answers never come."""

    def __init__(self) -> None:
        super().__init__()
        self.n_asked = self.n_closed = 0

    def status(self) -> Status:
        return Status(MODEL, facts=ModelFacts(n_vocab=100, longest=9, fim=MARKS))

    def ask(self, question: Question) -> Events:
        self.n_asked += 1
        return Events(self._close)

    def reply(self, request: ChatRequest) -> Events:
        return self.ask(Tokenize(""))

    def _close(self) -> None:
        self.n_closed += 1


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/v1/chat/completions/input_tokens",
        TEXT,
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/infill",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/embeddings",
    ],
)
def test_work_ends_when_the_client_leaves_whatever_it_asked_for(path: str) -> None:
    body = {
        "messages": [HELLO], "prompt": "a", "input": "a", "max_tokens": 5, "input_prefix": "a",
        "input_extra": [{"text": "a"}], "content": "a", "tokens": [1], "model": "m",
    }  # fmt: skip
    if "responses" in path:
        del body["prompt"]  # which is a template there
    backend = Silent()

    async def call() -> None:
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            while not backend.n_asked:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        app = guard(endpoint(Service(backend)), "127.0.0.1")
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": [(b"host", b"localhost")],
            "query_string": b"", "server": ("localhost", 1),
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(asyncio.wait_for(call(), 60))
    assert backend.n_asked == 1 and backend.n_closed >= 1
