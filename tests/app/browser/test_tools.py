"""Tools in the page: chosen, a call allowed once, its result, and the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.app.browser.chat import LAST, Chat, started
from tests.support.paths import ROOT


def test_a_tool_is_chosen_and_a_call_allowed_and_answered(context: Any, tmp_path: Path) -> None:
    program = {"command": sys.executable, "cwd": str(ROOT)}
    servers = {
        name: {**program, "args": ["-m", "tests.support.mcp_server", kind]}
        for name, kind in {"test": "", "broken": "broken"}.items()
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    with started("tests.support.tools_page", str(tmp_path)) as (address, _):
        chat = Chat(context, address)
        page = chat.page
        page.click("#show-settings")
        page.click("#tools")
        for name in ("test", "broken"):
            page.check(f".server[aria-label='{name}'] .row input")
        page.wait_for_selector(".server .tool:has-text('../../x Call fail instead.')")
        page.wait_for_selector(".server .notice:has-text('no key was given')")
        page.uncheck(".server[aria-label='broken'] .row input")
        page.uncheck(".server .tool:has-text('fail Fails.') input")
        page.keyboard.press("Escape")
        assert page.inner_text("#tools") == "Tools: test"
        page.keyboard.press("Control+.")

        chat.say("say it")
        asked = f"{LAST} .calls li"
        page.wait_for_selector(f"{asked}:has-text('echo of test waits for your answer')")
        assert page.inner_text(f"{asked} > pre") == '{"text": "<img src=x onerror=alert(1)>"}'
        chat.reload()
        page.click(f"{asked} button:text-is('Allow once')")
        page.wait_for_selector(f"{LAST} .answer:has-text('It says <img src=x onerror=alert(1)>')")
        made = ".turn:nth-child(2) .calls li"
        assert page.inner_text(f"{made} > p") == "echo of test has ended"
        assert not page.is_visible(f"{made} .answers")
        page.click(f"{made} summary")
        assert page.inner_text(f"{made} details pre") == "<img src=x onerror=alert(1)>"
        assert page.locator("#turns img").count() == 0

        chat.say("again")
        page.click(f"{LAST} button:text-is('Always in this chat')")
        page.wait_for_selector("#turns > :nth-child(6) .answer:has-text('It says')")
        chat.ask("and again", 9)
        page.click("#show-settings")
        page.click("#tools")
        page.click(".server[aria-label='test'] summary")
        page.click("button[aria-label='Attach Notes']")
        page.wait_for_selector("#files li:has-text('Notes11 B')")
        page.wait_for_selector("#right:not(.open)", state="attached")
        page.fill("#box", "First this.")
        page.click("#show-settings")
        page.click("#tools")
        page.click(".server[aria-label='test'] summary")
        page.click("button[aria-label='Attach Large']")
        page.wait_for_selector("#files li:has-text('Large900 kB')")
        page.click("#show-settings")
        page.click("#tools")
        page.click(".server[aria-label='test'] summary")
        page.click("button[aria-label='Insert review']")  # an argument is missing
        assert page.evaluate("document.activeElement.name") == "code"
        page.fill("input[aria-label='code']", "<b>")
        page.press("input[aria-label='code']", "Enter")
        page.wait_for_selector("dialog", state="detached")
        image = "[image, image/png, 300 bytes: not shown]"
        assert page.input_value("#box") == f"First this.\n\nReview <b>, kindly.\n\n{image}"
        assert chat.focused() == "box"
        page.press("#box", "Enter")
        page.wait_for_selector("#turns > :nth-child(10) .files li >> nth=1")
        chat.new_chat()
        assert page.text_content("#tools") == "Tools"
        assert chat.errors == []
        page.close()
