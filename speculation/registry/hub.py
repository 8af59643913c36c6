"""Downloads a file from the Hugging Face Hub into the hub's cache, resumably and with a checksum.

Built on huggingface_hub's public functions, so HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE
work as usual, and ``hf cache`` lists and removes the file. ``hf_hub_download`` alone is not enough:
it verifies no checksum, and deletes a partial file when a download is interrupted. Files already in
the cache are not hashed again.

    blobs/<sha256>    the complete file, renamed after its SHA-256 is verified
    blobs/<sha256>.<size>.<path@revision>.incomplete
        the partial file; survives disconnects, Ctrl-C and crashes. Its name tells which file it is
        a part of, and that file's size in bytes
"""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from urllib.parse import quote, unquote

import huggingface_hub as hf  # imports its parts when they are used, which takes long
from huggingface_hub import constants

from batching.errors import SpeculationError
from batching.watched import checkpoint
from speculation.registry.entries import HubFile, RegistryError, parse_hub
from speculation.system.files import in_words, sha256

if TYPE_CHECKING:
    from filelock import FileLock

_RETRIES = 5  # in a row, without a further byte
_LIST_SECONDS = 20.0  # for the list of a repository's files
_LOCK_SECONDS = 10.0  # a download that was just paused ends within
_BUSY = (408, 429)  # request timeout, too many requests: worth another try
_PARTIAL = re.compile(r"(?P<sha256>[0-9a-f]{64})\.(?P<size>\d+)\.(?P<file>.+)\.incomplete")


class DownloadFailed(SpeculationError):
    """The file could not be downloaded; the message says why and what to do."""


@dataclass(frozen=True)
class Partial:
    """What an interrupted download left of a file.

    done, total  bytes that are here, and of the whole file
    """

    wanted: HubFile
    path: Path
    done: int
    total: int


class Bar(Protocol):
    """A progress bar, such as ``tqdm.tqdm``."""

    def update(self, n: float, /) -> object: ...
    def close(self) -> object: ...


# Called with tqdm's keywords: total, desc, unit, unit_scale, disable. An exception raised by
# ``update`` ends the download; the partial file is kept.
BarMaker = Callable[..., Bar]


def terminal_bar(**given: Any) -> Any:
    """tqdm's bar, which shows only in a terminal."""
    from tqdm import tqdm

    return tqdm(**given)


def fetch(wanted: HubFile, bar: BarMaker = terminal_bar) -> Path:
    """The path of ``wanted`` in the hub's cache; downloads and verifies it if it is missing.

    ``bar`` is as in ``resolve``. Raises DownloadFailed.
    """
    from huggingface_hub.errors import HFValidationError

    repo, path, revision = wanted.repo, wanted.path, wanted.revision
    try:
        if path_in_cache := cached(wanted):
            return path_in_cache
        with _lost_connections():
            found = hf.get_hf_file_metadata(hf.hf_hub_url(repo, path, revision=revision))
        if found.size is None or not re.fullmatch("[0-9a-f]{64}", found.etag or ""):
            raise DownloadFailed(
                f"{constants.ENDPOINT} gives no SHA-256 for {repo}/{path} (etag {found.etag!r}), "
                f"so it cannot be verified; check HF_ENDPOINT and your proxy, or download it from "
                f"{page_url(wanted)} yourself and give its path"
            )
        folder = f"models--{repo.replace('/', '--')}"
        blob = Path(constants.HF_HUB_CACHE, folder, "blobs", str(found.etag))
        blob.parent.mkdir(parents=True, exist_ok=True)
        # Pinned to the commit, in case of a push in the meantime.
        url = hf.hf_hub_url(repo, path, revision=found.commit_hash or revision)
        with _lock(blob):
            if not blob.exists():
                made = bar(
                    total=found.size,
                    desc=path.rpartition("/")[2],
                    unit="B",
                    unit_scale=True,
                    disable=None,  # outside a terminal
                )
                with closing(made):
                    _download(wanted, url, found.size, blob, made)
        # Finds the blob, links it and records the commit.
        linked = Path(hf.hf_hub_download(repo, path, revision=revision))
        if not linked.is_symlink():  # a copy: Windows has no links without developer mode
            blob.unlink()
    except (OSError, HFValidationError, NotImplementedError) as error:
        raise DownloadFailed(_explain(wanted, error)) from error
    return linked


def gguf_files(repo: str) -> dict[str, int]:
    """The GGUF files of a repository on the hub, and their sizes in bytes.

    Raises DownloadFailed.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        with _lost_connections():
            api = hf.HfApi(constants.ENDPOINT)
            info = api.model_info(repo, files_metadata=True, timeout=_LIST_SECONDS)
    except (OSError, HFValidationError) as error:
        raise DownloadFailed(_explain(HubFile(repo, ""), error)) from error
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return {name: size for name, size in files.items() if name.endswith(".gguf")}


def cached(wanted: HubFile) -> Path | None:
    """The path of ``wanted`` in the hub's cache, or None."""
    found = hf.try_to_load_from_cache(wanted.repo, wanted.path, revision=wanted.revision)
    return Path(found) if isinstance(found, str) else None


def partials() -> list[Partial]:
    """What interrupted downloads left in the hub's cache."""
    found = []
    for path in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete")):
        repo = path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
        # It may be complete by now, or no file of this program.
        with suppress(FileNotFoundError, RegistryError):
            if match := _PARTIAL.fullmatch(path.name):
                wanted = parse_hub(f"hf:{repo}/{unquote(match['file'])}")
                found.append(Partial(wanted, path, path.stat().st_size, int(match["size"])))
    return found


def discard(partial: Partial) -> None:
    """Delete a partial file. Raises OSError, also if it is being downloaded."""
    from filelock import Timeout

    try:
        with _lock(partial.path.with_name(partial.path.name.partition(".")[0]), _LOCK_SECONDS):
            partial.path.unlink(missing_ok=True)
    except Timeout as error:
        raise OSError(
            f"{partial.wanted.path} is being downloaded, maybe by another program; stop that first"
        ) from error


def page_url(wanted: HubFile) -> str:
    """The file's page on the hub, for the user to open."""
    return f"{constants.ENDPOINT}/{wanted.repo}/blob/{wanted.revision}/{wanted.path}"


def _lock(blob: Path, timeout: float = -1) -> FileLock:
    """Two processes must not write one partial file. Raises Timeout after so many seconds."""
    from filelock import FileLock

    repo = blob.parents[1]
    lock = repo.with_name(".locks") / repo.name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(lock, timeout)


def _download(wanted: HubFile, url: str, size: int, blob: Path, bar: Bar) -> None:
    """Download or complete the partial file, verify its SHA-256, and rename it to ``blob``."""
    file_name = quote(f"{wanted.path}@{wanted.revision}", safe="@")
    partial = blob.with_name(f"{blob.name}.{size}.{file_name}.incomplete")
    with partial.open("a+b") as file:
        if (received := file.tell()) > size:  # not a part of this file
            file.truncate(0)
            received = file.seek(0)
        free = shutil.disk_usage(blob.parent).free
        if free < size - received:
            needs, has = (in_words(n) for n in (size - received, free))
            raise OSError(errno.ENOSPC, f"{needs} are needed, {has} are free", str(blob.parent))
        bar.update(received)
        _receive(url, file, size, bar)
    found = sha256(partial)
    if found != blob.name:
        partial.unlink()
        raise DownloadFailed(
            f"{wanted.repo}/{wanted.path} is corrupt: its SHA-256 is {found}, but the hub's is "
            f"{blob.name}. The file was deleted; try again to download it from the start. If it "
            "happens again, a proxy or mirror is changing it"
        )
    partial.replace(blob)


def _receive(url: str, file: BinaryIO, size: int, bar: Bar) -> None:
    """Append to ``file`` until it has ``size`` bytes. A lost connection is made again."""
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    while (before := file.tell()) < size:
        time.sleep(1 if failures else 0)
        try:
            with closing(_chunks(url, before)) as chunks:
                for chunk in chunks:
                    checkpoint()
                    file.write(chunk)
                    bar.update(len(chunk))
            if file.tell() < size:
                raise _ConnectionLost("the server sent too few bytes")
        except (_ConnectionLost, HfHubHTTPError) as error:
            failures = 1 if file.tell() > before else failures + 1
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code not in _BUSY
            if refused or failures > _RETRIES:
                raise


def _chunks(url: str, start: int) -> Generator[bytes, None, None]:
    """The bytes of ``url`` from ``start``. Raises _ConnectionLost and HfHubHTTPError."""
    # With compression, the offset of a later Range request would be wrong.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and (token := hf.get_token()):
        headers["Authorization"] = f"Bearer {token}"  # not sent to another host after a redirect
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with (
        _lost_connections(),
        hf.get_session().stream(
            "GET", url, headers=headers, timeout=timeout, follow_redirects=True
        ) as response,
    ):
        hf.hf_raise_for_status(response)
        n_known = 0 if response.status_code == 206 else start  # some servers send whole files only
        for chunk in response.iter_bytes():
            yield chunk[n_known:]
            n_known = max(0, n_known - len(chunk))


class _ConnectionLost(ConnectionError):
    """The connection failed; names the HTTP library's error."""


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Raise _ConnectionLost for the errors of the HTTP library.

    They cannot be named here: it is httpx for huggingface_hub 1 and httpx2 for 2.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (OSError, HFValidationError):  # of huggingface_hub and the system
        raise
    except Exception as error:
        raise _ConnectionLost(f"{type(error).__name__}: {error}") from error


def _explain(wanted: HubFile, error: Exception) -> str:
    """The error message for the user: what went wrong with ``wanted``, and what to do."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    file = f"{wanted.repo}/{wanted.path}" if wanted.path else f"the list of {wanted.repo}'s files"
    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    token = f"a token from {endpoint}/settings/tokens in HF_TOKEN (or run: hf auth login)"
    resumes = "try again to resume the download"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    match error:
        case OfflineModeIsEnabled() if not wanted.path:
            return f"HF_HUB_OFFLINE is set, so {file} cannot be read; unset it"
        case OfflineModeIsEnabled():
            return (
                f"{file} is not in the cache {cache} and HF_HUB_OFFLINE is set; unset it, or "
                f"download the file from {page_url(wanted)} elsewhere and give its path"
            )
        case GatedRepoError():  # a RepositoryNotFoundError too, so first
            return (
                f"{wanted.repo} is gated: request access at {endpoint}/{wanted.repo}, put {token}, "
                "then try again"
            )
        case RepositoryNotFoundError() | HFValidationError():
            return (
                f"{endpoint} has no repository {wanted.repo!r} that you can access; check its "
                f"name, or put {token} if it is private"
            )
        case RevisionNotFoundError():
            return (
                f"{wanted.repo} has no revision {wanted.revision!r}; "
                f"see {endpoint}/{wanted.repo}/commits/main"
            )
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return (
                f"{wanted.repo} has no file {wanted.path!r} at revision {wanted.revision!r}; "
                f"see {endpoint}/{wanted.repo}/tree/{wanted.revision}"
            )
        case HfHubHTTPError() if status in (401, 403):
            return f"{endpoint} denied access to {file} ({status}); put {token}"
        case HfHubHTTPError() if status:
            return f"{endpoint} returned {status} for {file}; wait a while, then {resumes}"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk is too full for {file}: {error}. Free some space, or set HF_HOME to a "
                f"folder on a larger disk; then {resumes}"
            )
        case LocalEntryNotFoundError() | ConnectionError():
            return (
                f"the connection to {endpoint} failed during the download of {file} "
                f"({error}); {resumes}. "
                "Behind a proxy, set HTTPS_PROXY; for a mirror, set HF_ENDPOINT"
            )
    return f"cannot save {file} in {cache}: {error}; set HF_HOME to a writable folder"
