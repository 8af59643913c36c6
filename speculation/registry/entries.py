"""models.txt: what a line means. Knows nothing of the network, of llama.cpp or of GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from batching.errors import SpeculationError

FORM = "name | source | draft | description"
HEADS = "heads"  # in the draft field: the line is no model
HUB_FORM = "hf:owner/repository/file.gguf, with @revision after it if need be"
PACKAGE_FORM = "package:name/file.gguf@sha256:…, with -> Q8_0 after it to convert it"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(?P<file>[^@|]+\.gguf)(@(?P<revision>.+))?"
)
_PACKAGE = re.compile(
    r"package:(?P<package>[A-Za-z_]\w*)/(?P<file>[^@|>]+\.gguf)"
    r"@sha256:(?P<sha256>[0-9a-f]{64})(\s*->\s*(?P<type>[A-Z0-9_]+))?"
)


class RegistryError(SpeculationError):
    """models.txt cannot be read, or one of its lines is not in the right form."""


class ModelNotFound(SpeculationError):
    """Neither a file nor a known name, or the file a known name stands for is missing."""


@dataclass(frozen=True)
class ModelEntry:
    """One line of models.txt.

    ``source`` is ``hf:…``, ``bundled:…``, ``package:…`` or an absolute path. ``draft`` is the name
    of the line whose model can draft for this one, None for none; ``heads`` are the names of lines
    that are drafting heads trained on it. ``is_heads`` says that this line is such heads, and no
    model.
    """

    name: str
    source: str
    draft: str | None
    description: str
    heads: tuple[str, ...] = ()
    is_heads: bool = False


@dataclass(frozen=True)
class HubFile:
    """One file of one repository on the hub, at a branch, tag or commit."""

    repo: str
    path: str
    revision: str = "main"


@dataclass(frozen=True)
class PackageFile:
    """One file of an installed Python package, by the package's import name.

    ``file_type`` is the type it is converted to, as in Q8_0; None uses it as it is.
    """

    package: str
    path: str
    sha256: str
    file_type: str | None = None


def parse_hub(source: str) -> HubFile:
    """``hf:owner/repository/folder/file.gguf@revision`` taken apart.

    Raises RegistryError when the text has another form.
    """
    match = _HUB.fullmatch(source)
    if match is None:
        raise RegistryError(f"{source!r} names no file on the hub; write {HUB_FORM}")
    wanted = HubFile(match["repo"], match["file"], match["revision"] or "main")
    # Both become paths in the cache: a step upwards would leave it.
    for text in (wanted.path, wanted.revision):
        if not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", text)):
            raise RegistryError(f"{source!r} has an empty, '.' or '..' step; write {HUB_FORM}")
    return wanted


def parse_package(source: str) -> PackageFile:
    """``package:name/file.gguf@sha256:… -> Q8_0`` taken apart.

    Raises RegistryError when the text has another form.
    """
    match = _PACKAGE.fullmatch(source)
    if match is None or not {"", ".", ".."}.isdisjoint(match["file"].split("/")):
        raise RegistryError(f"{source!r} names no file of a package; write {PACKAGE_FORM}")
    return PackageFile(match["package"], match["file"], match["sha256"], match["type"])


def parse_registry(text: str, file: Path) -> dict[str, ModelEntry]:
    """The entries of ``text`` in the order of its lines; ``file`` is where it was read from.

    A relative path in a source starts from the folder of ``file``.
    Raises RegistryError with file, line number, the line and the right form.
    """
    entries: dict[str, ModelEntry] = {}
    lines: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = _parse_line(line, file.parent)
            if entry.name in entries:
                first, _ = lines[entry.name]
                raise RegistryError(f"the name {entry.name!r} is taken by line {first}")
        except RegistryError as error:
            raise _wrong_line(file, number, line, str(error)) from None
        entries[entry.name] = entry
        lines[entry.name] = (number, line)
    for entry in entries.values():
        number, line = lines[entry.name]
        try:
            entries[entry.name] = _with_drafts_told_apart(entry, entries)
        except RegistryError as error:
            raise _wrong_line(file, number, line, str(error)) from None
    return entries


def _with_drafts_told_apart(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> ModelEntry:
    """The names in the draft field as what their own lines are: a draft model, or heads."""
    names = [] if entry.draft is None else [name.strip() for name in entry.draft.split(",")]
    draft, heads = None, []
    for name in names:
        if name == entry.name:
            raise RegistryError("a model cannot be its own draft; write -")
        if name not in entries:
            raise RegistryError(
                f"the draft {name!r} is no name in this file; write one that is, or -"
            )
        if entries[name].is_heads:
            heads.append(name)
        elif draft is None:
            draft = name
        else:
            raise RegistryError(f"{draft!r} and {name!r} are both draft models; leave one")
    return replace(entry, draft=draft, heads=tuple(heads))


def registry_file() -> Path:
    """models.txt of the checkout, or the copy shipped in the installed package.

    The bundled models lie in ``models/`` beside it, in both places.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "models.txt"
    return checkout if checkout.is_file() else package / "registry_data" / "models.txt"


def read_registry(path: Path | str | None = None) -> dict[str, ModelEntry]:
    """The entries of models.txt, or of the file at ``path``, by name.

    Raises RegistryError when the file cannot be read or a line of it is malformed.
    """
    file = registry_file() if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"cannot read {file}: {error}; restore the file, or give a model by its path"
        ) from error
    return parse_registry(text, file.absolute())


def _parse_line(line: str, folder: Path) -> ModelEntry:
    fields = [field.strip() for field in line.split("|", maxsplit=3)]
    if len(fields) < 4:
        raise RegistryError(f"{len(fields)} of 4 fields")
    name, source, draft, description = fields
    if not _NAME.fullmatch(name):
        raise RegistryError(f"the name {name!r} may have letters, digits, '.', '_' and '-' only")
    if not source:
        raise RegistryError("the source is empty")
    if not draft:
        raise RegistryError("the draft is empty; write - for none")
    source = _checked_source(source, folder)
    if draft == HEADS:
        return ModelEntry(name, source, None, description, is_heads=True)
    return ModelEntry(name, source, None if draft == "-" else draft, description)


def _checked_source(source: str, folder: Path) -> str:
    if source.startswith("hf:"):
        parse_hub(source)
        return source
    if source.startswith("package:"):
        parse_package(source)
        return source
    if source.startswith("bundled:"):
        file = source.removeprefix("bundled:")
        if not file or Path(file).name != file:
            raise RegistryError(f"{source!r} must name a file in models/: bundled:file.gguf")
        return source
    return str(folder / Path(source).expanduser())


def _wrong_line(file: Path, number: int, line: str, reason: str) -> RegistryError:
    where = f"{file}, line {number}"
    return RegistryError(f"{where}: {reason}\n    {line.strip()}\nThe form is: {FORM}")
