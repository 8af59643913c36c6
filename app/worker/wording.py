"""Errors in the words of the page: its fields come first, and the flags behind them."""

from __future__ import annotations

import re

FIELDS = {
    "--model": "Model",
    "--draft-model": "Draft model",
    "--heads": "Drafting heads",
    "--ctx": "Context",
}  # of ModelPanel

# What errors say of the chat to those who may be elsewhere.
_AFTER_FLAG = re.compile(
    rf"({'|'.join(FIELDS)})( \(in the chat: [^)]*\)|, or in the chat under Model)"
)
_FLAG = re.compile(rf"(?<!\S)({'|'.join(FIELDS)})(?![\w-])")


def in_page(message: str) -> str:
    """``raise --ctx (in the chat: …)`` as ``raise “Context” under Model (--ctx)``; flags without a
    field stay."""
    message = _AFTER_FLAG.sub(r"\1", message).replace("(in the chat: ", "(")
    return _FLAG.sub(lambda found: f"“{FIELDS[found[1]]}” under Model ({found[1]})", message)
