"""MCP servers: what they offer, what a call returns, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.mcp.config import ConfigError, read
from app.mcp.servers import Offer, Result, Servers, ToolError, safe_name
from tests.support.paths import ROOT
from tools.compare import free_port

PROGRAM = {"command": sys.executable, "cwd": str(ROOT)}


def server(kind: str = "", **more: Any) -> dict[str, Any]:
    return {**PROGRAM, "args": ["-m", "tests.support.mcp_server", kind], **more}


def written(path: Path, **servers: Any) -> Path:
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def run(path: Path, work: Callable[[Servers], Any]) -> Any:
    """What ``work`` returns, with the servers of ``path``, which are ended then."""

    async def done() -> Any:
        servers = Servers(path)
        try:
            return await work(servers)
        finally:
            servers.close()

    return asyncio.run(done())


async def by_name(servers: Servers, name: str = "test") -> dict[str, Offer]:
    return {tool.own: tool for tool in await servers.tools([name])}


def test_tools_have_names_that_models_can_write_and_results_are_text(tmp_path: Path) -> None:
    async def work(servers: Servers) -> list[Any]:
        assert [(one.name, one.state) for one in servers.states()] == [("test", "off")]
        tools = await by_name(servers)
        assert tools["../../x"].name == "test___x"
        assert tools["echo"].name == "test__echo"
        assert tools["echo"].schema["required"] == ["text"]
        assert [(one.name, one.state) for one in servers.states()] == [("test", "on")]
        results = [
            await servers.call("test", name, {"text": "héllo"})
            for name in ("echo", "env", "image", "fail", "../../x", "garbage")
        ]
        long = await servers.call("test", "long", {})
        assert long.text.endswith("\n[cut: 110,000 of 150,000 characters are left out]")
        return results

    path = written(tmp_path / "mcp.json", test=server(env={"KEY": "a secret"}))
    assert run(path, work) == [
        Result("héllo"),
        Result("a secret"),
        Result("[image, image/png, 300 bytes: not shown]"),
        Result("héllo", is_error=True),
        Result("héllo"),
        Result("héllo"),
    ]
    assert "a secret" not in repr(read(path))


def test_a_server_that_ends_is_started_again_once(tmp_path: Path) -> None:
    async def work(servers: Servers) -> list[str]:
        names = ("exit", "echo", "endless", "echo", "exit", "exit", "echo")
        return [(await servers.call("test", name, {"text": "here"})).text for name in names]

    found = run(written(tmp_path / "mcp.json", test=server()), work)
    ended, again = "test ended during the call", "here"
    assert found[:6] == [ended, again, ended, again, ended, ended]
    assert found[6] == "test has ended twice (it ended during a call); start it again"


def test_a_call_that_hangs_keeps_nobody_waiting_and_can_be_stopped(tmp_path: Path) -> None:
    async def work(servers: Servers) -> None:
        hanging = asyncio.create_task(servers.call("test", "hang", {}))
        assert await servers.call("other", "echo", {"text": "at once"}) == Result("at once")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging

    run(written(tmp_path / "mcp.json", test=server(), other=server()), work)


def test_a_server_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    async def work(servers: Servers) -> list[str]:
        found = []
        for name in ("broken", "missing", "unknown"):
            with pytest.raises(ToolError) as refused:
                await servers.tools([name])
            found.append(str(refused.value))
        many = await servers.tools(["many"])
        assert (len(many), many[63].name) == (64, "many__tool63")
        state = servers.states()[2]
        assert [len(some) for some in (state.tools, state.resources, state.prompts)] == [64] * 3
        assert servers.states()[2].note == (
            "9936 of its tools are left out; 9936 of its resources are left out; "
            "9936 of its prompts are left out"
        )
        return found

    path = tmp_path / "mcp.json"
    written(
        path,
        broken=server("broken"),
        missing={"command": "no-such-program"},
        many=server("crowded"),
    )
    assert run(path, work) == [
        "broken cannot be used: no key was given",
        "missing cannot be used: no-such-program: No such file or directory",
        f"there is no server 'unknown' in {path}",
    ]


def test_resources_and_prompts_are_read_if_the_server_offers_them(tmp_path: Path) -> None:
    async def work(servers: Servers) -> list[Any]:
        await servers.tools(["test", "odd"])
        odd, state = servers.states()
        assert (odd.state, odd.note) == ("on", "all of its resources are left out")
        assert state.note == "1 of its resources are left out"  # its URI is too long
        assert state.prompts == [
            Offer(
                *("test", "review", "review", "Reviews code."),
                {
                    "properties": {"code": {"description": ""}, "tone": {"description": "how"}},
                    "required": ["code"],
                },
            )
        ]
        refused = []
        for kind, own in (
            ("resources", "memo://endless"),
            ("resources", "file:///etc/passwd"),
            ("tools", "echo"),
            ("prompts", "none"),
        ):
            with pytest.raises(ToolError) as error:
                await servers.read("test", kind, own, {})  # type: ignore[arg-type]
            refused.append(str(error.value))
        return [
            await servers.read("test", "resources", "memo://notes", {}),
            await servers.read("test", "resources", "memo://logo", {}),
            [
                (n, t[899_999:])
                for n, t in await servers.read("test", "resources", "memo://large", {})
            ],
            await servers.read("test", "prompts", "review", {"code": "x = 1"}),
            refused,
        ]

    path = written(tmp_path / "mcp.json", odd=server("odd"), test=server())
    assert run(path, work) == [
        [("Notes", "It is noon.")],
        [("Logo", "[resource, image/png, 9 bytes: not shown]")],
        [("Large", "x\n[cut: 100,001 of 1,000,001 characters are left out]")],
        [
            ("review", "Review x = 1, kindly."),
            ("review", "[image, image/png, 300 bytes: not shown]"),
        ],
        [
            "test ended during the call",
            "test offers no 'file:///etc/passwd' among its resources",
            "test offers no 'echo' among its tools",
            "test offers no 'none' among its prompts",
        ],
    ]


HTTP = """
import sys
from mcp.server import MCPServer

server = MCPServer("test")
@server.tool()
def echo(text: str) -> str:
    return text

@server.tool()
def big() -> str:
    return "x" * 6_000_000

server.run("streamable-http", port=int(sys.argv[1]))
"""


def test_a_server_at_a_url_has_the_same_limit(tmp_path: Path) -> None:
    port = free_port()

    async def work(servers: Servers) -> list[Result]:
        for _ in range(300):
            with suppress(ToolError):  # it is not there yet
                await servers.restart("test")
                break
            await asyncio.sleep(0.1)
        return [await servers.call("test", one, {"text": "hi"}) for one in ("echo", "big", "echo")]

    path = written(tmp_path / "mcp.json", test={"url": f"http://127.0.0.1:{port}/mcp"})
    with subprocess.Popen([sys.executable, "-c", HTTP, str(port)]) as program:
        try:
            found = run(path, work)
        finally:
            program.kill()
    assert found[::2] == [Result("hi"), Result("hi")]
    assert found[1] == Result("test ended during the call", is_error=True)


def test_a_changed_file_starts_the_server_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "mcp.json", test=server(env={"KEY": "one"}))

    async def work(servers: Servers) -> list[str]:
        found = [(await servers.call("test", "env", {})).text]
        written(path, test=server(env={"KEY": "two"}))
        return [*found, (await servers.call("test", "env", {})).text]

    assert run(path, work) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a list of MCP servers (Input data was truncated); give"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "has a server 'a b'; name it with up to 32"),
        ('{"mcpServers": {"a": {}}}', "server 'a' needs a command or a url, and one of them"),
        (
            '{"mcpServers": {"a": {"command": "x", "url": "http://y"}}}',
            "server 'a' needs a command or a url, and one of them",
        ),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "must begin with http:// or https://"),
        ('{"mcpServers": {"a": {"command": 5}}}', "Expected `str`, got `int`"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_cause(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mcp.json"
    assert read(path) == {}
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert message in str(refused.value)


def test_names_are_short_and_no_two_tools_share_one() -> None:
    taken: list[str] = []
    for tool in ("a b", "a_b", "x" * 100, "x" * 101):
        taken.append(safe_name("s", tool, taken))
    assert taken == ["s__a_b", "s__a_b_2", f"s__{'x' * 61}", f"s__{'x' * 57}_2"]
