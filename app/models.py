"""``speculation models``: list the models of models.txt, or download some of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from batching.errors import SpeculationError
from speculation.registry import ModelEntry, default_model, is_local, read_registry
from speculation.registry.conversion import model_file
from speculation.system.console import replace_unencodable


def main(arguments: Sequence[str] | None = None) -> int:
    """List the models, or download the named ones; return the exit code."""
    replace_unencodable()
    parser = argparse.ArgumentParser(
        prog="speculation models",
        description="Lists the models of models.txt, or downloads some of them.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model to download")
    names = parser.parse_args(arguments).names
    try:
        for name in names:
            print(model_file(name))
        if not names:
            print(table(read_registry().values(), default_model()))
    except SpeculationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run again to resume the download", file=sys.stderr)
        return 130
    return 0


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
