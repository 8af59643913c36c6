"""``speculation models``: list the models of models.txt, or download some of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from speculation.registry import ModelEntry, default_model, is_local, read_registry
from speculation.registry.conversion import model_file
from speculation.system.console import run_command


def main(arguments: Sequence[str] | None = None, prog: str = "speculation models") -> int:
    """List the models, or download the named ones; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Lists the models of models.txt, or downloads some of them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model to download")
    names = parser.parse_args(arguments).names

    def run() -> None:
        for name in names:
            print(model_file(name))
        if not names:
            print(table(read_registry().values(), default_model()))

    return run_command(run, "interrupted; run again to resume the download")


def table(entries: Iterable[ModelEntry], default: str) -> str:
    """One line per model: name; ``default``, ``here`` (downloaded) or the download's size;
    description."""
    rows = [(e.name, _state(e, default), e.description) for e in entries]
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(
        f"{name:{width}}  {state:7}  {description}" for name, state, description in rows
    )


def _state(entry: ModelEntry, default: str) -> str:
    if entry.name == default:
        return "default"
    if is_local(entry):
        return "here"
    return f"{entry.n_bytes / 1e9:.2g} GB" if entry.n_bytes else ""
