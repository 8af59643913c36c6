"""The endpoint's list of the tools of MCP servers. It calls none of them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from app.api.errors import ApiError, answer_errors
from app.mcp.config import ConfigError
from app.mcp.servers import Servers, ToolError
from app.page.owners import STRANGER, is_trusted


def add_route(app: FastAPI, servers: Servers, *, is_one: bool) -> None:
    """``is_one``: only one person can use the server."""

    answer_errors(app, {ConfigError: 400, ToolError: 400})

    @app.get("/v1/tools")
    async def list_tools(http: Request) -> dict[str, Any]:
        """All tools, as a request may have them. Their servers are started."""
        if not is_trusted(http, "" if is_one else "somebody"):
            raise ApiError(STRANGER, 403)
        starting = (servers.tools([one.name]) for one in servers.states())
        await asyncio.gather(*starting, return_exceptions=True)  # the states tell
        found = servers.states()
        tools = [tool.as_function() for one in found for tool in one.tools]
        told = [{"name": one.name, "state": one.state, "note": one.note} for one in found]
        return {"object": "list", "data": tools, "servers": told}
