"""Runs a server's command, and ends it if it writes a line that is too long.

``python -m app.mcp.relay LIMIT COMMAND ARGS…``. What reads a server's output keeps a line in memory
until it ends, so a server that never ends one would fill it. Of stderr, the end is passed on when
the server has ended.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO

_END = 2000  # bytes of stderr


def main() -> int:
    limit = int(sys.argv[1])
    try:
        server = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
        return 1
    assert server.stdout is not None and server.stderr is not None
    errors = _Errors(server.stderr)
    while line := server.stdout.readline(limit + 1):
        if len(line) > limit:
            server.kill()
            print(f"it wrote a line of more than {limit:,} bytes", file=sys.stderr)
            return 1
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    status = server.wait()
    errors.join(1.0)
    sys.stderr.buffer.write(errors.end)
    return status


class _Errors(threading.Thread):
    """Reads stderr, and keeps its ``end``."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self.end = b""
        self.start()

    def run(self) -> None:
        while part := self._stream.read1(_END):  # type: ignore[attr-defined]
            self.end = (self.end + part)[-_END:]


if __name__ == "__main__":
    sys.exit(main())
