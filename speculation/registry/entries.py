"""Parses models.txt. Independent of the network, llama.cpp and the content of GGUFs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from batching.errors import SpeculationError
from batching.gguf.splits import part_names

LINE_FORMAT = "name | source | draft | description"
HEADS = "heads"  # begins the draft field of drafting heads; their methods follow
HUB_FORMAT = "hf:owner/repository/file.gguf or hf:owner/repository/file.gguf@revision"
PACKAGE_FORMAT = "package:name/file.gguf@sha256:…, optionally followed by -> Q8_0 to convert it"

_SIZED = re.compile(r"(?P<source>.+?)\s*\((?P<number>\d+(\.\d+)?) (?P<unit>MB|GB)\)")
_SAMPLED = re.compile(r"(?P<description>.*?)\s*\{(?P<sampling>[^{}]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(?P<file>[^@|]+\.gguf)(@(?P<revision>.+))?"
)
_PACKAGE = re.compile(
    r"package:(?P<package>[A-Za-z_]\w*)/(?P<file>[^@|>]+\.gguf)"
    r"@sha256:(?P<sha256>[0-9a-f]{64})(\s*->\s*(?P<type>[A-Z0-9_]+))?"
)


class RegistryError(SpeculationError):
    """models.txt cannot be read, or a line of it is malformed."""


class ModelNotFound(SpeculationError):
    """There is no such file or model name, or a model's file is missing."""


@dataclass(frozen=True)
class HubFile:
    """A file in a repository on the hub, at a branch, tag or commit."""

    repo: str
    path: str
    revision: str = "main"

    def __str__(self) -> str:
        """As ``parse_hub`` reads it."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repo}/{self.path}{revision}"

    @property
    def parts(self) -> list[HubFile]:
        """All files of a model that is split into several; else this one."""
        return [replace(self, path=path) for path in part_names(self.path)]


@dataclass(frozen=True)
class PackageFile:
    """A file of an installed Python package, by the package's import name.

    ``file_type`` is the type to convert it to, such as Q8_0; None = no conversion.
    """

    package: str
    path: str
    sha256: str
    file_type: str | None = None


@dataclass(frozen=True)
class ModelEntry:
    """One line of models.txt.

    source    a file on the hub, of a package, or at an absolute path
    draft     name of the draft model paired with this model, or None
    heads     names of the drafting heads paired with it
    is_heads  whether this line is a file of drafting heads instead of a model
    methods   the methods that such heads are for
    sampling  what the authors of its family recommend, by names of ``SamplingParams``, as texts
    n_bytes   about the size of the source's file; 0 if the line does not tell it
    """

    name: str
    source: HubFile | PackageFile | Path
    draft: str | None
    description: str
    heads: tuple[str, ...] = ()
    is_heads: bool = False
    n_bytes: int = 0
    methods: tuple[str, ...] = ()
    sampling: Mapping[str, str] = field(default_factory=dict, hash=False)


def title_of(name: str) -> str:
    """What a model is called, by its name or path: without folders and ``.gguf``."""
    return re.split(r"[/\\]", name)[-1].removesuffix(".gguf").removeprefix("ollama:")


def parse_hub(source: str) -> HubFile:
    """Parse ``hf:owner/repository/folder/file.gguf@revision``. Raises RegistryError."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise RegistryError(f"{source!r} is not a file on the hub; write {HUB_FORMAT}")
    wanted = HubFile(match["repo"], match["file"], match["revision"] or "main")
    # Both become paths in the cache, which '..' would leave.
    for text in (wanted.path, wanted.revision):
        if not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", text)):
            raise RegistryError(f"{source!r} has an empty, '.' or '..' part; write {HUB_FORMAT}")
    return wanted


def parse_package(source: str) -> PackageFile:
    """Parse ``package:name/file.gguf@sha256:… -> Q8_0``. Raises RegistryError."""
    match = _PACKAGE.fullmatch(source)
    if match is None or not {"", ".", ".."}.isdisjoint(match["file"].split("/")):
        raise RegistryError(f"{source!r} is not a file of a package; write {PACKAGE_FORMAT}")
    return PackageFile(match["package"], match["file"], match["sha256"], match["type"])


def parse_registry(text: str, file: Path) -> dict[str, ModelEntry]:
    """The entries in ``text`` by name, in order; ``file`` is where it was read from.

    Relative paths in sources are relative to the folder of ``file``. Raises RegistryError with the
    file, the line and the expected format.
    """
    entries: dict[str, ModelEntry] = {}
    lines: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        with _errors_of_line(file, number, line):
            entry = _parse_line(line, file.parent)
            if entry.name in entries:
                raise RegistryError(f"line {lines[entry.name][0]} has the name {entry.name!r} too")
        entries[entry.name] = entry
        lines[entry.name] = (number, line)
    for name, (number, line) in lines.items():
        with _errors_of_line(file, number, line):
            entries[name] = _pair(entries[name], entries)
    return entries


@contextmanager
def _errors_of_line(file: Path, number: int, line: str) -> Iterator[None]:
    """Add the file, the line and the right form to a RegistryError."""
    try:
        yield
    except RegistryError as error:
        raise RegistryError(
            f"{file}, line {number}: {error}\n    {line.strip()}\nFormat: {LINE_FORMAT}"
        ) from None


def _pair(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> ModelEntry:
    """The entry with the names in its draft field sorted into a draft model and heads."""
    names = [] if entry.draft is None else [name.strip() for name in entry.draft.split(",")]
    draft, heads = None, []
    for name in names:
        if name == entry.name:
            raise RegistryError("a model cannot be its own draft; write -")
        if name not in entries:
            raise RegistryError(f"the draft {name!r} is not a name in this file; write a name or -")
        if entries[name].is_heads:
            heads.append(name)
        elif draft is None:
            draft = name
        else:
            raise RegistryError(f"{draft!r} and {name!r} are both draft models; keep one")
    return replace(entry, draft=draft, heads=tuple(heads))


def registry_file() -> Path:
    """models.txt of the checkout, or its copy in the installed package.

    In both places, the bundled models are in ``models/`` next to it.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "models.txt"
    return checkout if checkout.is_file() else package / "registry_data" / "models.txt"


def read_registry(path: Path | str | None = None) -> dict[str, ModelEntry]:
    """The entries of models.txt, or of the file at ``path``, by name.

    Raises RegistryError if the file cannot be read or a line of it is malformed.
    """
    file = registry_file() if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"cannot read {file}: {error}; restore the file, or give the path of a model"
        ) from error
    return parse_registry(text, file.absolute())


def _parse_line(line: str, folder: Path) -> ModelEntry:
    fields = [field.strip() for field in line.split("|", maxsplit=3)]
    if len(fields) < 4:
        raise RegistryError(f"{len(fields)} of 4 fields")
    name, source, draft, description = fields
    if not _NAME.fullmatch(name):
        raise RegistryError(f"the name {name!r} must have only letters, digits, '.', '_' and '-'")
    if not source:
        raise RegistryError("the source is empty")
    if not draft:
        raise RegistryError("the draft is empty; write - for none")
    n_bytes = 0
    if sized := _SIZED.fullmatch(source):
        source = sized["source"]
        n_bytes = int(float(sized["number"]) * {"MB": 1e6, "GB": 1e9}[sized["unit"]])
    sampling: dict[str, str] = {}
    if sampled := _SAMPLED.fullmatch(description):
        description = sampled["description"]
        parts = (part.partition("=") for part in sampled["sampling"].split(","))
        sampling = {setting.strip(): value for setting, _, value in parts}
    found = ModelEntry(
        name, _parse_source(source, folder), None, description, n_bytes=n_bytes, sampling=sampling
    )
    first, *methods = draft.split()
    if first == HEADS:
        return replace(found, is_heads=True, methods=tuple(methods))
    return replace(found, draft=None if draft == "-" else draft)


def _parse_source(source: str, folder: Path) -> HubFile | PackageFile | Path:
    if source.startswith("hf:"):
        return parse_hub(source)
    if source.startswith("package:"):
        return parse_package(source)
    if source.startswith("bundled:"):
        file = source.removeprefix("bundled:")
        if not file or Path(file).name != file:
            raise RegistryError(f"{source!r} must name a file in models/: bundled:file.gguf")
        return folder / "models" / file
    return folder / Path(source).expanduser()
