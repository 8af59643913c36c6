"""Runs a server's command, and ends it if it writes a line that is too long.

``python -m app.mcp.relay LIMIT COMMAND ARGS…``. What reads a server's output keeps a line in memory
until it ends, so a server that never ends one would fill it. Of stderr, the end is passed on when
the server has ended.
"""

from __future__ import annotations

import subprocess
import sys
import threading

_END = 2000  # bytes of stderr


def main() -> int:
    limit = int(sys.argv[1])
    try:
        server = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
        return 1
    assert server.stdout is not None and server.stderr is not None
    read, end = server.stderr.read1, bytearray()  # type: ignore[attr-defined]

    def hear() -> None:
        while part := read(_END):
            end[:] = (end + part)[-_END:]

    hearing = threading.Thread(target=hear, daemon=True)
    hearing.start()
    while line := server.stdout.readline(limit + 1):
        if len(line) > limit:
            server.kill()
            print(f"it wrote a line of more than {limit:,} bytes", file=sys.stderr)
            return 1
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    status = server.wait()
    hearing.join(1.0)
    sys.stderr.buffer.write(end)
    return status


if __name__ == "__main__":
    sys.exit(main())
