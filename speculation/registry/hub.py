"""Downloads one file from the Hugging Face Hub into the hub's cache, and checks its SHA-256.

huggingface_hub does the work, so HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they
mean everywhere, and ``hf cache`` lists and removes the file. Two things are done here, because its
``hf_hub_download`` does not do them: it compares no checksum, and it deletes what had arrived when
a download is interrupted. A file in the cache is not hashed again.

    blobs/<sha256>.incomplete    grows; survives a dropped connection, Ctrl-C and a crash
    blobs/<sha256>               the same file, renamed once its SHA-256 is right
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
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
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not in __all__
    WeakFileLock,
    build_hf_headers,
    tqdm,
)
from huggingface_hub.utils.sha import sha_fileobj

from batching.errors import SpeculationError
from speculation.registry.entries import HubFile

# httpx for huggingface_hub 1, httpx2 for 2: the base that its own errors stand on fits both.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]


class DownloadFailed(SpeculationError):
    """The file could not be downloaded; the message says why and what to do."""


class Bar(Protocol):
    """What is used of a progress bar. ``tqdm.tqdm`` is one."""

    def update(self, n: float, /) -> object: ...
    def close(self) -> object: ...


# Called with tqdm's keywords: total, desc, unit, unit_scale, disable. An exception that ``update``
# raises ends the download; what has arrived stays.
BarMaker = Callable[..., Bar]


def fetch(wanted: HubFile, *, progress: bool | None = None, bar: BarMaker | None = None) -> Path:
    """The path of ``wanted`` in the hub's cache, downloaded and checked if it is not there yet.

    ``progress`` and ``bar`` are those of ``resolve``. Raises DownloadFailed.
    """
    repo, path, revision = wanted.repo, wanted.path, wanted.revision
    try:
        if here := cached(wanted):
            return here
        found = get_hf_file_metadata(hf_hub_url(repo, path, revision=revision))
        if found.size is None or not re.fullmatch("[0-9a-f]{64}", found.etag or ""):
            raise DownloadFailed(
                f"{constants.ENDPOINT} gives no SHA-256 for {repo}/{path} (etag "
                f"{found.etag!r}), so it cannot be checked; check HF_ENDPOINT and your proxy, or "
                f"fetch it from {page(wanted)} yourself and give its path"
            )
        folder = repo_folder_name(repo_id=repo, repo_type="model")
        blob = Path(constants.HF_HUB_CACHE, folder, "blobs", str(found.etag))
        # The hub's own name for the lock, so that its tools and ours wait for each other.
        lock = Path(constants.HF_HUB_CACHE, ".locks", folder, f"{blob.name}.lock")
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not blob.exists():
                # By the commit: a push in the meantime changes nothing.
                url = hf_hub_url(repo, path, revision=found.commit_hash or revision)
                _download(wanted, url, found.size, blob, _bar_maker(progress, bar))
        # Finds the blob, links it and notes the commit.
        linked = Path(hf_hub_download(repo, path, revision=revision))
        if not linked.is_symlink():  # no links here (Windows without developer mode): a copy
            blob.unlink()
    except (_HTTPError, OSError, HFValidationError) as error:
        raise DownloadFailed(_explain(wanted, error)) from error
    return linked


def cached(wanted: HubFile) -> Path | None:
    """The path of ``wanted`` in the hub's cache; None where it is not there."""
    found = try_to_load_from_cache(wanted.repo, wanted.path, revision=wanted.revision)
    return Path(found) if isinstance(found, str) else None


def page(wanted: HubFile) -> str:
    """The address of the file's page, for a person to open."""
    return f"{constants.ENDPOINT}/{wanted.repo}/blob/{wanted.revision}/{wanted.path}"


def _download(wanted: HubFile, url: str, size: int, blob: Path, bar: Callable[..., Any]) -> None:
    """Fill what is there of the file, check it, and give it its name."""
    partial = blob.with_name(f"{blob.name}.incomplete")
    with partial.open("a+b") as file:
        if (arrived := file.tell()) > size:  # not a beginning of this file
            arrived = file.truncate(0)
        free = shutil.disk_usage(blob.parent).free
        if free < size - arrived:
            needs, has = (tqdm.format_sizeof(n, "B") for n in (size - arrived, free))
            reason = f"{needs} are needed and {has} are free"
            raise OSError(errno.ENOSPC, reason, str(blob.parent))
        if arrived < size:
            # A compressed answer would make the byte counts of a later Range wrong.
            headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
            http_get(
                url,
                file,
                resume_size=arrived,
                headers=headers,
                displayed_filename=wanted.path.rpartition("/")[2],
                tqdm_class=bar,  # type: ignore[arg-type]  # called, never subclassed
            )
        file.seek(0)
        sha256 = sha_fileobj(file).hex()
    if sha256 != blob.name:
        partial.unlink()
        raise DownloadFailed(
            f"{wanted.repo}/{wanted.path} arrived with other bytes than the hub promised "
            f"(SHA-256 {sha256}, promised {blob.name}). The file was removed; run again to fetch "
            "it from the start. Should it happen again, a proxy or mirror is altering it"
        )
    partial.replace(blob)


def _bar_maker(progress: bool | None, make: BarMaker | None) -> Callable[..., Any]:
    """What http_get takes for tqdm: a context that makes a bar of ``make`` and closes it."""
    disable = None if progress is None else not progress  # None: shown in a terminal only

    @contextmanager
    def bar(*, initial: int, **keywords: Any) -> Iterator[Bar]:
        keywords = {key: keywords[key] for key in ("total", "desc", "unit", "unit_scale")}
        made: Bar = (make or tqdm)(disable=disable, **keywords)
        try:
            made.update(initial)
            yield made
        finally:
            made.close()

    return bar


def _explain(wanted: HubFile, error: Exception) -> str:
    """What went wrong with ``wanted``, for the person who reads it, and what to do."""
    file, endpoint, cache = (
        f"{wanted.repo}/{wanted.path}",
        constants.ENDPOINT,
        constants.HF_HUB_CACHE,
    )
    token = f"a token from {endpoint}/settings/tokens in HF_TOKEN (or run: hf auth login)"
    resumes = "run again: what has arrived is kept and the download resumes"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    match error:
        case OfflineModeIsEnabled():
            return (
                f"{file} is not in the cache {cache} and HF_HUB_OFFLINE forbids fetching it; unset "
                f"HF_HUB_OFFLINE, or fetch it elsewhere from {page(wanted)} and give its path"
            )
        case GatedRepoError():  # a RepositoryNotFoundError too, so first
            return (
                f"{wanted.repo} is gated: ask for access at {endpoint}/{wanted.repo}, put {token}, "
                "then run again"
            )
        case RepositoryNotFoundError() | HFValidationError():
            return (
                f"{endpoint} has no repository {wanted.repo!r} that you may read; check its name, "
                f"and if it is private put {token}"
            )
        case RevisionNotFoundError():
            return (
                f"{wanted.repo} has no revision {wanted.revision!r}; "
                f"those it has are listed at {endpoint}/{wanted.repo}/commits/main"
            )
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return (
                f"{wanted.repo} has no file {wanted.path!r} at revision {wanted.revision!r}; "
                f"those it has are listed at {endpoint}/{wanted.repo}/tree/{wanted.revision}"
            )
        case HfHubHTTPError() if status in (401, 403):
            return f"{endpoint} refused {file} ({status}); put {token} that may read it"
        case HfHubHTTPError() if status:
            return f"{endpoint} answered {status} for {file}; wait a while and {resumes}"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk is full: {error}. Free some space for {file}, or set HF_HOME to a "
                f"folder on a larger disk; {resumes}"
            )
        case LocalEntryNotFoundError() | ConnectionError() | _HTTPError():
            return (
                f"the connection to {endpoint} failed while fetching {file} "
                f"({type(error).__name__}: {error}); {resumes}. "
                "Behind a proxy set HTTPS_PROXY, for a mirror set HF_ENDPOINT"
            )
    return f"cannot store {file} in {cache}: {error}; set HF_HOME to a folder you can write"
