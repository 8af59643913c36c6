"""Small JSON files of the user's that hold what can be found out again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from batching.replacing import replacing

T = TypeVar("T")


class KeptFile(Generic[T]):
    """A file with a value of the type ``kind``, which without arguments is an empty one."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path, self._kind, self._type = path, kind, TypeAdapter(kind)

    def read(self) -> T:
        """The value; an empty one if there is none that can be read."""
        try:
            return self._type.validate_json(self._path.read_bytes())
        except (OSError, ValueError):
            return self._kind()

    def write(self, value: T) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path, private=True) as file:
                file.write(self._type.dump_json(value))
        except OSError as error:
            logging.getLogger(__name__).warning("%s cannot be written: %s", self._path, error)
