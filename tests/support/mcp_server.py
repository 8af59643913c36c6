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
    names = [f"tool{i}" for i in range(10_000)] if kind == "many" else list(TOOLS)
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message["method"], message.get("params", {})
        if "id" not in message:
            continue
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "initialize":
            answer["result"] = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "test", "version": "1"},
            }
        elif method == "tools/list":
            tools = [
                {"name": name, "description": TOOLS.get(name, ""), "inputSchema": TEXT}
                for name in names
            ]
            answer["result"] = {"tools": tools}
        elif method == "tools/call":
            answer["result"] = result(params["name"], params.get("arguments", {}))
        else:
            answer["error"] = {"code": -32601, "message": f"no method {method}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
