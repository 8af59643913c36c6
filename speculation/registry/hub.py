"""Downloads a file from the Hugging Face Hub into the hub's cache, resumably and with a checksum.

Built on huggingface_hub, so HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE work as usual, and
``hf cache`` lists and removes the file. ``hf_hub_download`` alone is not enough: it verifies no
checksum, and deletes a partial file when a download is interrupted. Files already in the cache are
not hashed again.

    blobs/<sha256>.incomplete    the partial file; survives disconnects, Ctrl-C and crashes
    blobs/<sha256>               the complete file, renamed after its SHA-256 is verified
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

# httpx for huggingface_hub 1, httpx2 for 2: the base class of its errors fits both.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]


class DownloadFailed(SpeculationError):
    """The file could not be downloaded; the message says why and what to do."""


class Bar(Protocol):
    """A progress bar, such as ``tqdm.tqdm``."""

    def update(self, n: float, /) -> object: ...
    def close(self) -> object: ...


# Called with tqdm's keywords: total, desc, unit, unit_scale, disable. An exception raised by
# ``update`` ends the download; the partial file is kept.
BarMaker = Callable[..., Bar]


def fetch(wanted: HubFile, *, progress: bool | None = None, bar: BarMaker | None = None) -> Path:
    """The path of ``wanted`` in the hub's cache; downloads and verifies it if it is missing.

    ``progress`` and ``bar`` are as in ``resolve``. Raises DownloadFailed.
    """
    repo, path, revision = wanted.repo, wanted.path, wanted.revision
    try:
        if path_in_cache := cached(wanted):
            return path_in_cache
        found = get_hf_file_metadata(hf_hub_url(repo, path, revision=revision))
        if found.size is None or not re.fullmatch("[0-9a-f]{64}", found.etag or ""):
            raise DownloadFailed(
                f"{constants.ENDPOINT} gives no SHA-256 for {repo}/{path} (etag {found.etag!r}), "
                f"so it cannot be verified; check HF_ENDPOINT and your proxy, or download it from "
                f"{page_url(wanted)} yourself and give its path"
            )
        folder = repo_folder_name(repo_id=repo, repo_type="model")
        blob = Path(constants.HF_HUB_CACHE, folder, "blobs", str(found.etag))
        # huggingface_hub's own lock file, so that its downloads and ours exclude each other.
        lock = Path(constants.HF_HUB_CACHE, ".locks", folder, f"{blob.name}.lock")
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not blob.exists():
                # Pinned to the commit, in case of a push in the meantime.
                url = hf_hub_url(repo, path, revision=found.commit_hash or revision)
                _download(wanted, url, found.size, blob, _bar_maker(progress, bar))
        # Finds the blob, links it and records the commit.
        linked = Path(hf_hub_download(repo, path, revision=revision))
        if not linked.is_symlink():  # a copy: Windows has no links without developer mode
            blob.unlink()
    except (_HTTPError, OSError, HFValidationError) as error:
        raise DownloadFailed(_explain(wanted, error)) from error
    return linked


def cached(wanted: HubFile) -> Path | None:
    """The path of ``wanted`` in the hub's cache, or None."""
    found = try_to_load_from_cache(wanted.repo, wanted.path, revision=wanted.revision)
    return Path(found) if isinstance(found, str) else None


def page_url(wanted: HubFile) -> str:
    """The file's page on the hub, for the user to open."""
    return f"{constants.ENDPOINT}/{wanted.repo}/blob/{wanted.revision}/{wanted.path}"


def _download(wanted: HubFile, url: str, size: int, blob: Path, bar: Callable[..., Any]) -> None:
    """Download or complete the partial file, verify its SHA-256, and rename it to ``blob``."""
    partial = blob.with_name(f"{blob.name}.incomplete")
    with partial.open("a+b") as file:
        if (received := file.tell()) > size:  # not a part of this file
            received = file.truncate(0)
        free = shutil.disk_usage(blob.parent).free
        if free < size - received:
            needs, has = (tqdm.format_sizeof(n, "B") for n in (size - received, free))
            raise OSError(errno.ENOSPC, f"{needs} are needed, {has} are free", str(blob.parent))
        if received < size:
            # With compression, the offset of a later Range request would be wrong.
            headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
            http_get(
                url,
                file,
                resume_size=received,
                headers=headers,
                displayed_filename=wanted.path.rpartition("/")[2],
                tqdm_class=bar,  # type: ignore[arg-type]  # called, never subclassed
            )
        file.seek(0)
        sha256 = sha_fileobj(file).hex()
    if sha256 != blob.name:
        partial.unlink()
        raise DownloadFailed(
            f"{wanted.repo}/{wanted.path} is corrupt: its SHA-256 is {sha256}, but the hub's is "
            f"{blob.name}. The file was deleted; run again to download it from the start. If it "
            "happens again, a proxy or mirror is changing it"
        )
    partial.replace(blob)


def _bar_maker(progress: bool | None, make: BarMaker | None) -> Callable[..., Any]:
    """The ``tqdm_class`` for http_get: a context manager that makes a bar and closes it."""
    disable = None if progress is None else not progress  # None = shown in a terminal only

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
    """The error message for the user: what went wrong with ``wanted``, and what to do."""
    file, endpoint, cache = (
        f"{wanted.repo}/{wanted.path}",
        constants.ENDPOINT,
        constants.HF_HUB_CACHE,
    )
    token = f"a token from {endpoint}/settings/tokens in HF_TOKEN (or run: hf auth login)"
    resumes = "run again to resume the download"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    match error:
        case OfflineModeIsEnabled():
            return (
                f"{file} is not in the cache {cache} and HF_HUB_OFFLINE is set; unset it, or "
                f"download the file from {page_url(wanted)} elsewhere and give its path"
            )
        case GatedRepoError():  # a RepositoryNotFoundError too, so first
            return (
                f"{wanted.repo} is gated: request access at {endpoint}/{wanted.repo}, put {token}, "
                "then run again"
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
        case LocalEntryNotFoundError() | ConnectionError() | _HTTPError():
            return (
                f"the connection to {endpoint} failed during the download of {file} "
                f"({type(error).__name__}: {error}); {resumes}. "
                "Behind a proxy, set HTTPS_PROXY; for a mirror, set HF_ENDPOINT"
            )
    return f"cannot save {file} in {cache}: {error}; set HF_HOME to a writable folder"
