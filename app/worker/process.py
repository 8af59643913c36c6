"""Starts the engine's process. Needs no other module, so it can start before they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

COMMAND = [sys.executable, "-m", "app.worker"]
_early: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}  # by command


def start_early() -> None:
    """Start the process of an engine without arguments. It ends with this one."""
    command = (*COMMAND, "", "", "")
    with suppress(OSError):  # the backend tells of it
        _early[command] = started(*command)


def started(*command: str) -> subprocess.Popen[bytes]:
    """The process that was started early with this command, or another one. Raises OSError."""
    return _early.pop(command, None) or subprocess.Popen(
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
