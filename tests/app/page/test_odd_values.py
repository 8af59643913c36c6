"""Odd values at all routes of the page: none is answered with status 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.support.page import Page

HALF = "\ud800"
DEEP: Any = json.loads("[" * 940 + "]" * 940)
VALUES: dict[str, tuple[Any, ...]] = {
    "settings": (
        *({"method": 5}, {"method": HALF}, {"sampling": {HALF: 1}}, {"sampling": {"top_k": "x"}}),
        *({"parameters": {"a": []}}, {"system": f"{HALF}\0"}, {HALF: 5}, {"x": DEEP}),
    ),
    "files": ([{"kept": 2**70}], [{"pdf": "*"}], [{"text": HALF, "name": "\0"}], [{"leads": 2}]),
    "methods": (["a", "b"], [HALF, "ar"], ["ar", "\0"]),
    "": (None, True, -1, 2**70, 1e308, HALF, "\0", [None], {"x": 5}, DEEP),
}
PLACES = ("x", "-1", str(2**70), "%00", "%ED%A0%80", "1e5")
BODIES = (b"", b"[", b"5", b"null", b"\xff", b"[" * 900 + b"]" * 900)


def test_odd_values_are_refused_or_taken_and_leave_the_chats_readable(
    page: Page,
) -> None:
    answered: list[str] = []
    schema = page.client.get("../openapi.json").json()
    for path, methods in schema["paths"].items():
        if not path.startswith("/page/") or path in ("/page/events", "/page/models/hub"):
            continue
        for method, about in methods.items():
            chat, (_, turn) = page.talk("hi")
            known = {"chat": chat, "turn": str(turn), "number": "0", "race": "x"}
            known |= {"server": "x", "kind": "prompts"}
            for place, content in asked(path, about, known, schema):
                place = place.removeprefix("/page/")
                answer = page.client.request(method, place, content=content)
                answered.append(f"{answer.status_code} {method} {place} {content!r:.200}")
                if answer.status_code >= 500:
                    print(answered[-1], answer.text[:300])
            for events in page.backend.replies:
                events.close()
    assert len(answered) > 500
    assert [one for one in answered if one.startswith("5")] == []
    for path in ("chats", "state", "export", "search?q=x"):
        assert page.client.get(path).status_code == 200
    for chat in page.get("chats?limit=500")["chats"]:
        page.turns(chat["id"])


def asked(path: str, about: Any, known: dict[str, str], schema: Any) -> Iterator[tuple[str, bytes]]:
    """Requests to a route: with odd places, queries and bodies."""
    usual = path.format(**known)
    for name in [name for name in known if f"{{{name}}}" in path]:
        yield from ((path.format(**{**known, name: odd}), b"{}") for odd in PLACES)
    for one in about.get("parameters", ()):
        if one["in"] == "query":
            yield from ((f"{usual}?{one['name']}={odd}", b"") for odd in PLACES)
    if "requestBody" in about:
        yield from ((usual, body) for body in BODIES)
    if "requestBody" in about:
        kind = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = schema["components"]["schemas"][kind.split("/")[-1]]["properties"]
        usually = {"name": "x", "settings": {}, "methods": ["ar", "ar"], "prompt": "x"}
        given = {name: value for name, value in usually.items() if name in fields}
        for name in fields:
            for value in (*VALUES[""], *VALUES.get(name, ())):
                yield usual, json.dumps({**given, name: value}).encode()
