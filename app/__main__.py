"""``python -m app``: the chat in the browser, with the endpoint. See app/start.py."""

import signal
import sys

if __name__ == "__main__":
    # Python prints a traceback for Ctrl-C while modules are imported, which takes a second.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from app.cli import without_traceback
    from app.start import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(without_traceback(main))
