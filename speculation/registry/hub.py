"""One file from the Hugging Face Hub into its cache, checked before it gets its name there.

huggingface_hub gives the address, the token, the connection, the offline mode and the cache, so
HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean here what they mean everywhere. The bytes are
received here, because its own download compares no checksum, and from some 1.x on deletes what had
arrived when it is interrupted.

    blobs/<sha256>.incomplete    grows; survives a dropped connection, Ctrl-C and a crash
    blobs/<sha256>               the same file, renamed once its SHA-256 is right
    snapshots/<commit>/<path>    a link to it
    refs/<revision>              the commit

This is the hub's own layout, so its other tools find the file and ``hf cache`` can remove it. A
file found in the cache is not hashed again: only whole and checked files get a name there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import tqdm
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not in __all__
    WeakFileLock,
    are_progress_bars_disabled,
    build_hf_headers,
)

from batching.errors import SpeculationError
from speculation.registry.entries import HubFile

CHUNK = 1 << 20  # bytes read at once when a file left over is hashed
RETRY_WAITS = (0.0, 1.0, 2.0, 4.0, 8.0)  # seconds; counted anew after every byte that arrives
RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})

# httpx for huggingface_hub 1, httpx2 for 2: the base that its own errors stand on fits both.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class DownloadFailed(SpeculationError):
    """The file could not be fetched whole; the message says why and what to do."""


class Bar(Protocol):
    """What is used of a progress bar. ``tqdm.tqdm`` is one."""

    def update(self, n: float, /) -> object: ...
    def close(self) -> object: ...


# Called with tqdm's keywords: total, desc, unit, unit_scale, disable.
BarMaker = Callable[..., Bar]


@dataclass(frozen=True)
class _Remote:
    """What the hub says of the file. ``url`` names the commit: a push meanwhile changes nothing."""

    url: str
    commit: str
    size: int  # bytes
    sha256: str


def fetch(wanted: HubFile, *, progress: bool | None = None, bar: BarMaker | None = None) -> Path:
    """The path of ``wanted`` in the hub's cache, downloaded and checked if it is not there yet.

    ``progress`` and ``bar`` are those of ``resolve``. Raises DownloadFailed.
    """
    try:
        if found := cached(wanted):
            return found
        remote = _look_up(wanted)
        return _fetch_remote(wanted, remote, _bar_maker(progress, bar))
    except (_HTTPError, OSError, HFValidationError) as error:
        raise DownloadFailed(_explain(wanted, error)) from error


def cached(wanted: HubFile) -> Path | None:
    """The path of ``wanted`` in the hub's cache; None where it is not there."""
    found = try_to_load_from_cache(wanted.repo, wanted.path, revision=wanted.revision)
    return Path(found) if isinstance(found, str) else None


def page(wanted: HubFile) -> str:
    """The address of the file's page, for a person to open."""
    return f"{constants.ENDPOINT}/{wanted.repo}/blob/{wanted.revision}/{wanted.path}"


def _look_up(wanted: HubFile) -> _Remote:
    file, endpoint = f"{wanted.repo}/{wanted.path}", constants.ENDPOINT
    found = get_hf_file_metadata(hf_hub_url(wanted.repo, wanted.path, revision=wanted.revision))
    commit, size, etag = found.commit_hash, found.size, found.etag
    if commit is None or not _COMMIT.fullmatch(commit) or size is None:
        raise DownloadFailed(
            f"{endpoint} gave no commit or size for {file}, so it is no Hugging Face Hub; "
            "check HF_ENDPOINT and your proxy"
        )
    if etag is None or not _SHA256.fullmatch(etag):
        raise DownloadFailed(
            f"{endpoint} gives no SHA-256 for {file} (etag {etag!r}), so it cannot be checked; "
            f"fetch it from {page(wanted)} yourself and give its path"
        )
    url = hf_hub_url(wanted.repo, wanted.path, revision=commit)
    return _Remote(url, commit, size, etag)


def _fetch_remote(wanted: HubFile, remote: _Remote, make_bar: BarMaker) -> Path:
    cache = Path(constants.HF_HUB_CACHE)
    folder = "models--" + wanted.repo.replace("/", "--")
    blob = cache / folder / "blobs" / remote.sha256
    # The hub's own name for the lock, so that its tools and ours wait for each other.
    lock = cache / ".locks" / folder / f"{remote.sha256}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            partial = blob.with_name(blob.name + ".incomplete")
            bar = make_bar(total=remote.size, desc=wanted.path.rpartition("/")[2])
            try:
                _download(wanted, remote, partial, bar)
            finally:
                bar.close()
            partial.replace(blob)
        return _enter(wanted, remote, cache / folder, blob)


def _download(wanted: HubFile, remote: _Remote, partial: Path, bar: Bar) -> None:
    """Fill ``partial`` and check it. What is there already counts and is not asked for again."""
    with _Partial(partial, remote.size, bar) as part:
        _check_space(partial.parent, remote.size - part.length)
        waits = iter(RETRY_WAITS)
        while part.length < remote.size:
            before = part.length
            try:
                _receive(remote, part)
            except (_HTTPError, ConnectionError) as error:
                if isinstance(error, HfHubHTTPError) and _status(error) not in RETRY_STATUS:
                    raise
                if part.length > before:
                    waits = iter(RETRY_WAITS)
                if (wait := next(waits, None)) is None:
                    raise
                time.sleep(wait)
        good = part.length == remote.size and part.sha256.hexdigest() == remote.sha256
    if not good:
        partial.unlink()
        raise DownloadFailed(
            f"{wanted.repo}/{wanted.path} arrived with other bytes than the hub promised "
            f"(SHA-256 {part.sha256.hexdigest()}, {part.length} bytes; "
            f"promised {remote.sha256}, {remote.size} bytes). The file was removed; run again to "
            "fetch it from the start. Should it happen again, a proxy or mirror is altering it"
        )


def _receive(remote: _Remote, part: _Partial) -> None:
    """One request for what is missing. Raises on anything short of the whole file."""
    # A compressed answer would make the byte counts of a later Range wrong.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if part.length > 0:
        headers["Range"] = f"bytes={part.length}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", remote.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if response.status_code == 200:  # the whole file, whether or not a part was asked for
            part.restart()
        for chunk in response.iter_bytes():  # as they arrive: a drop loses no half-full chunk
            part.append(chunk)
            if part.length > remote.size:  # never fill a disk with what cannot be right
                return
    if part.length < remote.size:
        raise ConnectionError(f"the connection closed after {part.length} of {remote.size} bytes")


class _Partial:
    """The file as far as it has come: its bytes on disk, their count and their SHA-256."""

    def __init__(self, path: Path, size: int, bar: Bar) -> None:
        self._bar = bar
        self._file = path.open("a+b")
        self.length = 0
        self.sha256 = hashlib.sha256()
        if path.stat().st_size > size:  # not a beginning of this file
            self._file.truncate(0)
        self._file.seek(0)
        while chunk := self._file.read(CHUNK):
            self._count(chunk)

    def __enter__(self) -> _Partial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:  # the rename must not reach the disk before the bytes do
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        if self.length == 0:
            return
        self._file.truncate(0)
        self._bar.update(-self.length)
        self.length = 0
        self.sha256 = hashlib.sha256()

    def _count(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        self.length += len(chunk)
        self._bar.update(len(chunk))


def _enter(wanted: HubFile, remote: _Remote, repo: Path, blob: Path) -> Path:
    """Give the checked blob its place in the cache: a link in the snapshot, and the ref."""
    snapshot = repo / "snapshots" / remote.commit / wanted.path
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    if not snapshot.exists():
        snapshot.unlink(missing_ok=True)  # a link whose blob was deleted
        try:
            snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))
        except OSError:  # no links here (Windows without developer mode): the hub moves it then too
            blob.replace(snapshot)
    if wanted.revision != remote.commit:
        ref = repo / "refs" / wanted.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(remote.commit)
    return snapshot


def _bar_maker(progress: bool | None, make: BarMaker | None) -> BarMaker:
    disable = None if progress is None else not progress  # None: shown in a terminal only
    if progress is None and are_progress_bars_disabled():  # HF_HUB_DISABLE_PROGRESS_BARS
        disable = True

    def bar(**keywords: Any) -> Bar:
        made: Bar = (make or tqdm.tqdm)(unit="B", unit_scale=True, disable=disable, **keywords)
        return made

    return bar


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{_size(needed)} are needed and {_size(free)} are free"
        raise OSError(errno.ENOSPC, reason, str(folder))


def _status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def _explain(wanted: HubFile, error: Exception) -> str:
    """What went wrong with ``wanted``, for the person who reads it, and what to do."""
    file, endpoint = f"{wanted.repo}/{wanted.path}", constants.ENDPOINT
    cache = constants.HF_HUB_CACHE
    token = f"a token from {endpoint}/settings/tokens in HF_TOKEN (or run: hf auth login)"
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{file} is not in the cache {cache} and HF_HUB_OFFLINE forbids fetching it; unset "
            f"HF_HUB_OFFLINE, or fetch it elsewhere from {page(wanted)} and give its path"
        )
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError too, so first
        return (
            f"{wanted.repo} is gated: ask for access at {endpoint}/{wanted.repo}, put {token}, "
            "then run again"
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return (
            f"{endpoint} has no repository {wanted.repo!r} that you may read; check its name, "
            f"and if it is private put {token}"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{wanted.repo} has no revision {wanted.revision!r}; "
            f"those it has are listed at {endpoint}/{wanted.repo}/commits/main"
        )
    if isinstance(error, EntryNotFoundError):
        return (
            f"{wanted.repo} has no file {wanted.path!r} at revision {wanted.revision!r}; "
            f"those it has are listed at {endpoint}/{wanted.repo}/tree/{wanted.revision}"
        )
    if isinstance(error, HfHubHTTPError):
        status = _status(error)
        if status in (401, 403):
            return f"{endpoint} refused {file} ({status}); put {token} that may read it"
        return (
            f"{endpoint} answered {status} for {file}; wait a while and run again: "
            "what has arrived is kept and the download resumes"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {error}. Free some space for {file}, or set HF_HOME to a folder on "
            "a larger disk; run again and the download resumes"
        )
    if isinstance(error, (_HTTPError, ConnectionError)):
        return (
            f"the connection to {endpoint} failed while fetching {file} "
            f"({type(error).__name__}: {error}); run again: what has arrived is kept and the "
            "download resumes. Behind a proxy set HTTPS_PROXY, for a mirror set HF_ENDPOINT"
        )
    return f"cannot store {file} in {cache}: {error}; set HF_HOME to a folder you can write"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
