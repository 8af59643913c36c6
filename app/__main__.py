"""``python -m app``: the commands of ``speculation``; without one, the chat."""

import sys

from app.cli import main

if __name__ == "__main__":
    given = sys.argv[1:]
    is_chat = not given or given[0].startswith("-")
    sys.exit(main(["chat", *given] if is_chat else given, "python -m app"))
