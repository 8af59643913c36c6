"""Starts the engine's process. Needs no other module, so it can start before they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

COMMAND = [sys.executable, "-m", "app.worker"]
_early: list[subprocess.Popen[bytes]] = []


def start_early() -> None:
    """Start the process of an engine without arguments. It ends with this one."""
    with suppress(OSError):  # the backend tells of it
        _early.append(started(*COMMAND, "", "", ""))


def started(*command: str) -> subprocess.Popen[bytes]:
    """The process that was started early, if with this command, or another. Raises OSError."""
    if _early:
        early = _early.pop()
        if early.args == command:
            return early
        early.kill()
        early.communicate()  # closes its pipes
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            "GGML_NO_BACKTRACE": "1",  # else the reason for an abort is lost in a debugger's
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        start_new_session=True,  # Ctrl-C is this process's business
    )
