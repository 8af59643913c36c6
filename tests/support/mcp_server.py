"""An MCP server for tests, which can be hostile: ``python -m tests.support.mcp_server KIND``."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = {
    "echo": "Says the text.",
    "env": "The value of KEY.",
    "pid": "The number of the process.",
    "image": "An image.",
    "long": "A long text.",
    "fail": "Fails.",
    "exit": "Ends the server.",
    "hang": "Never answers.",
    "garbage": "Writes what is no JSON first.",
    "endless": "Writes a line without end.",
    "../../x": "Call fail instead.",
}
RESOURCES = {
    "memo://notes": ("Notes", "text/plain", {"text": "It is noon."}),
    "memo://logo": ("Logo", "image/png", {"blob": "iVBORw0KGgo="}),
    "memo://large": ("Large", "text/plain", {"text": "x" * 1_000_001}),
    "memo://endless": ("Endless", "text/plain", {}),
    "memo://" + "x" * 20_000: ("Named at length", "text/plain", {}),
}
PROMPT = {
    "name": "review",
    "description": "Reviews code.",
    "arguments": [{"name": "code", "required": True}, {"name": "tone", "description": "how"}],
}


def listed(kind: str, is_many: bool) -> list[dict[str, Any]]:
    names = [f"{kind[:-1]}{i}" for i in range(10_000)] if is_many else list(TOOLS)
    if kind == "tools":
        return [
            {"name": name, "description": TOOLS.get(name, ""), "inputSchema": TEXT}
            for name in names
        ]
    if kind == "prompts":
        return [{"name": name} for name in names] if is_many else [PROMPT]
    if is_many:
        return [{"uri": name, "name": name} for name in names]
    return [{"uri": uri, "name": one[0]} for uri, one in RESOURCES.items()]


def read(uri: str) -> dict[str, Any]:
    while uri == "memo://endless":
        sys.stdout.write("x" * 100_000)
    _, kind, has = RESOURCES[uri]
    return {"contents": [{"uri": uri, "mimeType": kind, **has}]}


def prompt(arguments: dict[str, str]) -> dict[str, Any]:
    text = f"Review {arguments['code']}, {arguments.get('tone', 'kindly')}."
    contents = (
        {"type": "text", "text": text},
        {"type": "image", "data": "AAAA" * 100, "mimeType": "image/png"},
    )
    return {"messages": [{"role": "user", "content": one} for one in contents]}


def result(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = str(arguments.get("text", ""))
    if name == "exit":
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "garbage":
        print('{"jsonrpc": "2.0", "id": [[[', flush=True)
    while name == "endless":
        sys.stdout.write("x" * 100_000)
    if name == "image":
        return {"content": [{"type": "image", "data": "AAAA" * 100, "mimeType": "image/png"}]}
    found = {"env": os.environ.get("KEY", ""), "pid": str(os.getpid()), "long": "long " * 30_000}
    return {
        "content": [{"type": "text", "text": found.get(name, text)}],
        "isError": name == "fail",
    }


def main(kind: str) -> None:
    if kind == "broken":
        sys.exit("no key was given")
    if kind == "leaky":
        sys.exit(f"the key {os.environ['KEY']} is wrong")
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message["method"], message.get("params", {})
        if "id" not in message:
            continue
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "initialize":
            answer["result"] = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
                "serverInfo": {"name": "test", "version": "1"},
            }
        elif method == "resources/list" and kind == "odd":
            answer["error"] = {"code": -32603, "message": "not today"}
        elif method.endswith("/list"):
            listing = method.removesuffix("/list")
            answer["result"] = {
                listing: listed(listing, kind == "crowded" or (kind, listing) == ("many", "tools"))
            }
        elif method == "resources/read":
            answer["result"] = read(params["uri"])
        elif method == "prompts/get":
            answer["result"] = prompt(params["arguments"])
        elif method == "tools/call":
            answer["result"] = result(params["name"], params.get("arguments", {}))
        else:
            answer["error"] = {"code": -32601, "message": f"no method {method}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
