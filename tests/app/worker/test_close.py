"""Ctrl-C ends the app even if the engine does not respond."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.paths import ROOT

WEDGED = """
import os, signal, sys
from app import __main__
from app.worker import remote

def stopped(self):
    process = started(self)
    os.kill(process._process.pid, signal.SIGSTOP)
    print(process._process.pid, file=sys.stderr, flush=True)
    return process

started, remote.RemoteBackend._started = remote.RemoteBackend._started, stopped
remote.CLOSE_SECONDS = {seconds}
__main__.main(["--no-browser"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends signals another way")
@pytest.mark.parametrize(("seconds", "presses"), [(0.2, 1), (3600, 2)])
def test_ctrl_c_ends_the_app_even_if_the_engine_does_not_respond(
    seconds: float, presses: int
) -> None:
    """Once is enough after a while; a second time ends it at once."""
    command = [sys.executable, "-W", "ignore", "-c", WEDGED.format(seconds=seconds)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            stopped = int(process.stderr.readline())
            assert "press Ctrl-C to stop" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            if presses == 1:
                assert process.wait(60) == 1
                return
            while process.poll() is None:  # the first one may not have been noticed yet
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            assert process.returncode == -signal.SIGINT
        finally:
            process.kill()
            with suppress(ProcessLookupError):  # a stopped process cannot end by itself
                os.kill(stopped, signal.SIGKILL)
