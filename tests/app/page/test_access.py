"""Who may use the page's routes, and whose chats they see."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.fake_backend import FakeBackend
from tests.support.page import Page, Written, served


def test_every_key_and_every_browser_of_others_has_its_own_chats(tmp_path: Path) -> None:
    backend = Written()
    with served(backend, tmp_path / "a.db", keys=("a", "b"), is_one=False) as site:
        ann, bob = (site.page(Authorization=f"Bearer {key}") for key in "ab")
        assert site.page().get("state", 401)
        chat = ann.new_chat()
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
        ann.post(f"chats/{chat}/messages", text="hi")
        assert backend.requests[0].memory == ann.get("state")["owner"] != ""
    with served(FakeBackend(), tmp_path / "b.db", host="0.0.0.0", is_one=False) as site:
        ann, bob = site.page(), site.page()
        assert "Ask for /page/state first" in ann.get("chats", 403)["error"]["message"]
        answer = ann.client.get("state")
        bob.get("state")
        for word in ("HttpOnly", "SameSite=strict"):
            assert word in answer.headers["set-cookie"]
        assert "set-cookie" not in ann.client.get("state").headers
        chat = ann.new_chat()
        assert [one["id"] for one in ann.get("chats")["chats"]] == [chat]
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
    with served(FakeBackend(), tmp_path / "c.db") as site:
        answer = site.page().client.get("state")
        assert (answer.json()["owner"], "set-cookie" in answer.headers) == ("", False)


def test_other_sites_and_unknown_methods_are_refused_in_the_endpoints_form(page: Page) -> None:
    own = str(page.client.base_url).removesuffix("/page/")
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),  # enough for the endpoint
        ({"Host": "evil.example"}, 403),
        ({"Origin": own}, 200),
    ):
        answer = page.client.post("chats", json={}, headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or answer.json()["error"]["type"] == "permission_error"
        for path in ("state", "events"):
            if status == 403:
                with page.client.stream("GET", path, headers=headers) as answer:
                    assert answer.status_code == status
    assert httpx.put(f"{own}/page/chats").json()["error"]["code"] == 405
    assert httpx.get(f"{own}/page/nothing").json()["error"]["code"] == 404
    assert page.ask("PATCH", f"chats/{page.new_chat()}", title="Mine")["title"] == "Mine"
