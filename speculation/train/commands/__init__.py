"""The subcommands of ``python -m speculation.train``, one line each."""

from __future__ import annotations

from speculation.train.commands import draft, eagle, medusa, redrafter, tree

COMMANDS = (medusa.command, redrafter.command, eagle.command, draft.command, tree.command)
