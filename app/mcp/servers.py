"""MCP servers: started when a chat uses them, asked for their tools, and ended with this process.

All of it happens in a thread with an event loop of its own, so that nothing a server sends keeps
others waiting. What a server says is never trusted: names are made safe, texts are cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from app.mcp import config

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
START_SECONDS = 120.0  # npx downloads a server first
CALL_SECONDS = 300.0
END_SECONDS = 10.0
MOST_LINE = 4_000_000  # bytes of a message of a server
MOST_TOOLS = 64  # of a server; a model has to read them all
MOST_DESCRIPTION = 1000  # characters
MOST_SCHEMA = 10_000  # characters of a tool's schema, as JSON
MOST_RESULT = 40_000  # characters
MOST_NAME = 64  # characters
LEAST_KEY = 6  # characters; shorter values are words such as true
_RELAY = Path(__file__).with_name("relay.py")


class ToolError(Exception):
    """A server cannot be used, or a call failed. The message is for the user and the model."""


@dataclass(frozen=True)
class Tool:
    """A tool of a server.

    name  as the model calls it: letters, digits, - and _
    own   its name at the server
    """

    server: str
    name: str
    own: str
    description: str
    schema: Mapping[str, Any]

    def as_function(self) -> dict[str, Any]:
        """The tool as OpenAI's API has it."""
        about = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": about}


@dataclass(frozen=True)
class Result:
    """What a call returned, as text."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class State:
    """A server as it is shown.

    state  "off", "starting", "on" or "failed"
    note   why it failed, or which of its tools are left out
    """

    name: str
    state: str
    note: str = ""
    tools: tuple[Tool, ...] = ()


class Servers:
    """The servers of an ``mcp.json``, which is read anew whenever it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, _Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.current_thread()  # of the loop, once that runs
        self._lock = threading.Lock()

    def states(self) -> list[State]:
        """All servers. Raises ConfigError."""
        found = config.read(self.path)
        return [
            self._open[name].state if name in self._open else State(name, "off") for name in found
        ]

    async def tools(self, names: Sequence[str]) -> list[Tool]:
        """The tools of these servers, which are started. Raises ConfigError and ToolError."""
        opened = await asyncio.gather(*(self._do(self._connected(name)) for name in names))
        tools = [tool for one in opened for tool in one.state.tools]
        return list({tool.name: tool for tool in tools}.values())

    async def call(
        self, tool: Tool, arguments: Mapping[str, Any], most: int = MOST_RESULT
    ) -> Result:
        """Call a tool. What went wrong is in the result, for the model to read, of which there are
        ``most`` characters."""

        async def called() -> Result:
            connection = await self._connected(tool.server)
            return await connection.call(tool.own, arguments, min(most, MOST_RESULT))

        try:
            return await self._do(called())
        except (ToolError, config.ConfigError) as error:
            return Result(str(error), is_error=True)

    async def restart(self, name: str) -> State:
        """Start a server again, such as one that failed."""

        async def restarted() -> State:
            before = self._open.pop(name, None)
            if before is not None:
                await before.close()
            return (await self._connected(name)).state

        return await self._do(restarted())

    def close(self) -> None:
        """End all servers. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return

        async def closed() -> None:
            await asyncio.gather(*(one.close() for one in self._open.values()))

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(closed(), loop).result(END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(END_SECONDS)

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the thread of the servers. If this is cancelled, so is the work."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="mcp", daemon=True
                )
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    async def _connected(self, name: str) -> _Connection:
        server = config.read(self.path).get(name)
        if server is None:
            raise ToolError(f"there is no server {name!r} in {self.path}")
        found = self._open.get(name)
        if found is not None and found.server != server:  # the file has changed
            await found.close()
            found = None
        if found is None:
            found = self._open[name] = _Connection(name, server)
        await found.open()
        return found


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Connection:
    """A server, which is started again once if it ends by itself."""

    def __init__(self, name: str, server: config.Server) -> None:
        self.name, self.server = name, server
        self.state = State(name, "off")
        self._n_starts = 0
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> Client:
        """The client of the running server. Raises ToolError."""
        if self._task is None:
            if self._n_starts > 1:
                raise ToolError(f"{self.name} has ended twice ({self.state.note}); start it again")
            self._n_starts += 1
            self.state = State(self.name, "starting")
            self._closing.clear()
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._ready))
        assert self._ready is not None
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), START_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):
            await self.close()
            note = f"it did not answer within {START_SECONDS:.0f} seconds"
            self.state = State(self.name, "failed", note)
            raise ToolError(f"{self.name} cannot be used: {note}") from None

    async def call(self, tool: str, arguments: Mapping[str, Any], most: int) -> Result:
        client = await self.open()
        try:
            found = await client.call_tool(tool, dict(arguments))
        except Exception as error:  # of any kind: the server chooses what happens
            if _is_gone(error):
                await self.close()
                self.state = State(self.name, "failed", "it ended during a call")
                raise ToolError(f"{self.name} ended during the call") from None
            raise ToolError(f"{self.name}: {self._without_keys(_reason(error))}") from None
        text = "\n".join([_text(block) for block in found.content])
        if not text and found.structured_content is not None:
            text = json.dumps(found.structured_content, ensure_ascii=False)
        self._n_starts = 1  # it works
        return Result(cut(text, most) or "(no output)", bool(found.is_error))

    def _without_keys(self, text: str) -> str:
        """What a server says of a failure, without the values that only its file may have."""
        for value in (*self.server.env.values(), *self.server.headers.values()):
            for part in (value, *value.split()):
                if len(part) >= LEAST_KEY:
                    text = text.replace(part, "[hidden]")
        return text

    async def close(self) -> None:
        task, self._task = self._task, None
        self._closing.set()
        if task is not None:
            done, _ = await asyncio.wait([task], timeout=END_SECONDS)
            if not done:
                task.cancel()
        self.state = State(self.name, "off")

    async def _run(self, ready: asyncio.Future[Client]) -> None:
        """Keep the server open until ``close``."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            await self._keep_open(ready, errors)

    async def _keep_open(self, ready: asyncio.Future[Client], errors: IO[str]) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await _connect(self.server, errors, stack)
                self.state = await self._listed(client)
                ready.set_result(client)
                await self._closing.wait()
        except Exception as error:
            reason = cut(self._without_keys(_end_of(errors) or _reason(error)), 500)
            self._task, self.state = None, State(self.name, "failed", reason)
            if not ready.done():
                ready.set_exception(ToolError(f"{self.name} cannot be used: {reason}"))
                ready.exception()  # nobody need ask

    async def _listed(self, client: Client) -> State:
        """The server with its tools, as far as they can be shown to a model."""
        found: list[Tool] = []
        left_out: list[str] = []
        cursor = None
        while len(found) < MOST_TOOLS:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                schema = tool.input_schema
                if len(json.dumps(schema)) > MOST_SCHEMA or len(found) == MOST_TOOLS:
                    left_out.append(tool.name)
                    continue
                name = safe_name(self.name, tool.name, {one.name for one in found})
                said = cut(tool.description or "", MOST_DESCRIPTION)
                found.append(Tool(self.name, name, tool.name, said, schema))
            cursor = page.next_cursor
            if cursor is None:
                break
        note = f"{len(left_out) or 'some'} of its tools are left out" if left_out or cursor else ""
        return State(self.name, "on", note, tuple(found))


async def _connect(server: config.Server, errors: Any, stack: AsyncExitStack) -> Client:
    """The client of a server, which is open as long as ``stack``."""
    from mcp import Client, StdioServerParameters  # takes half a second to import
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs what servers send
    if server.url:
        http = await stack.enter_async_context(_http(server))
        transport: Any = streamable_http_client(
            server.url, http_client=http, max_sse_event_size=MOST_LINE
        )
    else:
        relay = ["-I", str(_RELAY), str(MOST_LINE), server.command, *server.args]
        params = StdioServerParameters(
            command=sys.executable, args=relay, env=server.env, cwd=server.cwd
        )
        transport = stdio_client(params, errlog=errors)
    client = Client(transport, read_timeout_seconds=CALL_SECONDS, cache=None)
    return await stack.enter_async_context(client)


def _http(server: config.Server) -> Any:
    """A client for a server at a URL, whose answers have a limit."""
    import httpx2

    class Limited(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            n = 0
            async for part in self._stream:
                n += len(part)
                if n > MOST_LINE:
                    raise httpx2.ReadError(f"it sent more than {MOST_LINE:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            # A stream of events may be long; each of them has its own limit.
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.stream = Limited(response.stream)
            return response

    timeout = httpx2.Timeout(START_SECONDS, read=CALL_SECONDS)
    return httpx2.AsyncClient(transport=Transport(), timeout=timeout, headers=server.headers)


def safe_name(server: str, tool: str, taken: Collection[str]) -> str:
    """A name for a tool of a server that models can write, and that no other tool has."""
    wanted = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{server}__{tool}")[:MOST_NAME]
    name, n = wanted, 1
    while name in taken:
        n += 1
        name = f"{wanted[: MOST_NAME - 4]}_{n}"
    return name


def cut(text: str, most: int = MOST_RESULT) -> str:
    """The beginning of a text that is too long, and a note."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {len(text) - most:,} of {len(text):,} characters are left out]"


def _text(block: Any) -> str:
    """A part of a result as a model reads it: text, or what the part is."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    of = block.resource if block.type == "resource" else block
    if isinstance(text := getattr(of, "text", None), str):
        return text
    size = len(getattr(of, "data", None) or getattr(of, "blob", None) or "") * 3 // 4
    return f"[{block.type}, {of.mime_type or 'unknown type'}, {size:,} bytes: not shown]"


def _is_gone(error: Exception) -> bool:
    """Whether the server has ended, rather than refused a call."""
    from mcp import MCPError
    from mcp_types.jsonrpc import CONNECTION_CLOSED

    return not isinstance(error, MCPError) or error.error.code == CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
    """What went wrong, in a line. Errors of tasks come in groups."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return cut(" ".join(str(error).split()) or type(error).__name__, 500)


def _end_of(errors: IO[str]) -> str:
    """The last line that a server wrote to stderr."""
    errors.seek(0)
    lines = errors.read(10_000).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
