"""MCP servers: started when a chat uses them, asked for what they have, ended with this process.

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
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, get_args

from app.mcp import config

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
Kind = Literal["tools", "resources", "prompts"]
START_SECONDS = 120.0  # npx downloads a server first
CALL_SECONDS = 300.0
END_SECONDS = 10.0
MOST_LINE = 4_000_000  # bytes of a message of a server
MOST_OFFERS = 64  # of a kind; a model has to read all tools
MOST_DESCRIPTION = 1000  # characters
MOST_SCHEMA = 10_000  # characters of a name and its schema, as JSON
MOST_RESULT = 40_000  # characters
MOST_READ = 900_000  # characters of a resource; a message has 1 MB of files
MOST_NAME = 64  # characters
LEAST_KEY = 6  # characters; shorter values are words such as true
_RELAY = Path(__file__).with_name("relay.py")


class ToolError(Exception):
    """A server cannot be used, or a call failed. The message is for the user and the model."""


@dataclass(frozen=True)
class Offer:
    """A tool, a resource or a prompt of a server.

    name    of a tool, as the model calls it: letters, digits, - and _; of others, as it is shown
    own     its name at the server, or a resource's URI
    schema  of the arguments
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
    note   why it failed, or what of its offers is left out
    """

    name: str
    state: str
    note: str = ""
    tools: Sequence[Offer] = ()
    resources: Sequence[Offer] = ()
    prompts: Sequence[Offer] = ()


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

    async def tools(self, names: Sequence[str]) -> list[Offer]:
        """The tools of these servers, which are started. Raises ConfigError and ToolError."""
        opened = await asyncio.gather(*(self._do(self._connected(name)) for name in names))
        tools = [tool for one in opened for tool in one.state.tools]
        return list({tool.name: tool for tool in tools}.values())

    async def call(
        self, server: str, tool: str, arguments: Mapping[str, Any], most: int = MOST_RESULT
    ) -> Result:
        """Call a tool. What went wrong is in the result, for the model to read, of which there are
        ``most`` characters."""

        async def called() -> Result:
            found = await (await self._connected(server)).ask("call_tool", tool, dict(arguments))
            text = "\n".join([_text(block) for block in found.content])
            if not text and found.structured_content is not None:
                text = json.dumps(found.structured_content, ensure_ascii=False)
            return Result(cut(text, min(most, MOST_RESULT)) or "(no output)", bool(found.is_error))

        try:
            return await self._do(called())
        except (ToolError, config.ConfigError) as error:
            return Result(str(error), is_error=True)

    async def read(
        self, server: str, kind: Kind, own: str, arguments: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """The texts of a resource or a prompt that the server offers, each with its name. Raises
        ConfigError and ToolError."""

        async def found() -> list[tuple[str, str]]:
            connection = await self._connected(server)
            names = {one.own: one.name for one in getattr(connection.state, kind)}
            if kind == "tools" or own not in names:
                raise ToolError(f"{server} offers no {own[:80]!r} among its {kind}")
            if kind == "resources":
                parts = (await connection.ask("read_resource", own)).contents[:MOST_OFFERS]
                most = MOST_READ
            else:
                given = {name: value for name, value in arguments.items() if value}
                messages = (await connection.ask("get_prompt", own, given)).messages
                parts, most = [one.content for one in messages], MOST_RESULT
            return [(names[own], cut(_text(one), most // len(parts))) for one in parts]

        return await self._do(found())

    async def restart(self, name: str) -> None:
        """Start a server again, such as one that failed. Raises as ``tools`` does."""
        if before := self._open.pop(name, None):
            await self._do(before.close())
        await self.tools([name])

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

    async def ask(self, method: str, *given: Any) -> Any:
        """What a method of the client returns. Raises ToolError."""
        client = await self.open()
        try:
            found = await getattr(client, method)(*given)
        except Exception as error:  # of any kind: the server chooses what happens
            if _is_gone(error):
                await self.close()
                self.state = State(self.name, "failed", "it ended during a call")
                raise ToolError(f"{self.name} ended during the call") from None
            raise ToolError(f"{self.name}: {self._without_keys(_reason(error))}") from None
        self._n_starts = 1  # it works
        return found

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
        """The server with its offers, as far as they can be shown."""
        offers: dict[str, Sequence[Offer]] = {}
        notes = []
        for kind in get_args(Kind):
            if getattr(client.server_capabilities, kind) is None:
                continue
            try:
                offers[kind], n_left_out = await self._some(client, kind)
            except Exception as error:
                if kind == "tools" or _is_gone(error):
                    raise
                n_left_out = "all"
            if n_left_out:
                notes.append(f"{n_left_out} of its {kind} are left out")
        return State(self.name, "on", "; ".join(notes), **offers)

    async def _some(self, client: Client, kind: Kind) -> tuple[list[Offer], int | str]:
        """The first offers of a kind, and how many are left out."""
        found: list[Offer] = []
        n_left_out, cursor = 0, None
        while len(found) < MOST_OFFERS:
            page = await getattr(client, f"list_{kind}")(cursor=cursor)
            for one in getattr(page, kind):
                own, schema = getattr(one, "uri", one.name), _schema(one)
                if len(own + json.dumps(schema)) > MOST_SCHEMA or len(found) == MOST_OFFERS:
                    n_left_out += 1
                    continue
                name = (one.title or one.name)[:MOST_NAME]
                if kind == "tools":
                    name = safe_name(self.name, own, {one.name for one in found})
                said = cut(one.description or "", MOST_DESCRIPTION)
                found.append(Offer(self.name, name, own, said, schema))
            cursor = page.next_cursor
            if cursor is None:
                return found, n_left_out
        return found, n_left_out or "some"


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

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            # A stream of events may be long; each of them has its own limit.
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return response
            body = b""
            async with aclosing(response):
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > MOST_LINE:
                        raise httpx2.ReadError(f"it sent more than {MOST_LINE:,} bytes")
            return httpx2.Response(response.status_code, headers=response.headers, content=body)

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


def _schema(offer: Any) -> Mapping[str, Any]:
    """Of the arguments of a tool, or of a prompt; a resource has none."""
    given = getattr(offer, "arguments", None) or ()
    about = {one.name: {"description": one.description or ""} for one in given}
    required = [one.name for one in given if one.required]
    found: Mapping[str, Any] = getattr(offer, "input_schema", {})
    return found or {"properties": about, "required": required}


def cut(text: str, most: int = MOST_RESULT) -> str:
    """The beginning of a text that is too long, and a note."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {len(text) - most:,} of {len(text):,} characters are left out]"


def _text(block: Any) -> str:
    """A part of a result as a model reads it: text, or what the part is."""
    type_, of = getattr(block, "type", "resource"), getattr(block, "resource", block)
    if type_ == "resource_link":
        return f"[{block.name}: {block.uri}]"
    if isinstance(text := getattr(of, "text", None), str):
        return text
    size = len(getattr(of, "data", None) or getattr(of, "blob", None) or "") * 3 // 4
    return f"[{type_}, {of.mime_type or 'unknown type'}, {size:,} bytes: not shown]"


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
