"""The servers of ``mcp.json``, in the form that other programs use, too.

``{"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"], "env": {"KEY": "…"}},
"search": {"url": "http://…/mcp", "headers": {"Authorization": "…"}}}}``

Only this file names commands, and nobody can change it through the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_MOST_SERVERS = 32


class ConfigError(Exception):
    """``mcp.json`` cannot be used; the message says why, and never repeats a value of it."""


@dataclass(frozen=True)
class Server:
    """How a server is reached: by a command that is started, or at a URL.

    env      added to PATH, HOME and a few more, which are all of this process that a command gets
    headers  of each request to ``url``
    """

    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class _File(msgspec.Struct, rename={"servers": "mcpServers"}):
    servers: dict[str, Server]


def read(path: Path) -> dict[str, Server]:
    """The servers in ``path``, by name; none if there is no such file. Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File).servers
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f'{path} is not a list of MCP servers ({error}); give {{"mcpServers": {{"name": '
            f'{{"command": "…", "args": []}}}}}}'
        ) from None
    if len(found) > _MOST_SERVERS:
        raise ConfigError(f"{path} has {len(found)} servers; give {_MOST_SERVERS} at most")
    for name, server in found.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path} has a server {name[:40]!r}; name it with up to 32 letters, digits, - and _"
            )
        if bool(server.command) == bool(server.url):
            raise ConfigError(f"{path}: server {name!r} needs a command or a url, and one of them")
        if server.url and not server.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{path}: the url of server {name!r} must begin with http:// or https://"
            )
    return found
