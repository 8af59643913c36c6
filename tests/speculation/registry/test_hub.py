"""Downloading a model from a hub: resuming, checks, errors, and environment variables."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import close_session, hf_hub_download

from speculation.registry import DownloadFailed, ModelEntry, resolve
from speculation.registry.entries import HubFile
from tests.support.hub_server import COMMIT, HubServer, use_hub
from tests.support.paths import ROOT

CONTENT = bytes(range(256)) * 12_000  # 3,072,000 bytes
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PARTIAL = f"{SHA256}.3072000.model.gguf@main.incomplete"
SOURCE = "hf:owner/repo/model.gguf"
REGISTRY = {"tiny": ModelEntry("tiny", HubFile("owner/repo", "model.gguf"), None, "")}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with one file."""
    with HubServer() as server:
        server.add("owner/repo", "model.gguf", CONTENT)
        use_hub(server, cache, monkeypatch)
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
        monkeypatch.setattr(Bar, "made", [])
        close_session()
        yield server
        close_session()


def blobs(cache: Path) -> dict[str, int]:
    """Names and sizes of the repository's files in the cache."""
    folder = cache / "models--owner--repo" / "blobs"
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def fetched(**settings: Any) -> bytes:
    return resolve("tiny", registry=REGISTRY, **settings).read_bytes()


def failure(source: str = "tiny") -> str:
    with pytest.raises(DownloadFailed) as caught:
        resolve(source, registry=REGISTRY)
    return str(caught.value)


class Bar:
    """A stand-in for tqdm that records its calls."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **keywords: Any) -> None:
        self.made.append(self)
        self.keywords = keywords
        self.at = 0.0
        self.closed = False

    def update(self, n: float, /) -> None:
        self.at += n

    def close(self) -> None:
        self.closed = True


def test_all_files_of_a_split_model_are_fetched(hub: HubServer, cache: Path) -> None:
    names = [f"q4/m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for name in names:
        hub.add("owner/repo", name, name.encode())
    snapshot = cache / "models--owner--repo" / "snapshots" / COMMIT
    assert resolve(f"hf:owner/repo/{names[1]}") == snapshot / names[0]
    assert [(snapshot / name).read_text() for name in names] == names


def test_a_model_is_fetched_once_and_then_read_from_the_cache(hub: HubServer, cache: Path) -> None:
    path = resolve("tiny", registry=REGISTRY)
    assert path == cache / "models--owner--repo" / "snapshots" / COMMIT / "model.gguf"
    assert path.read_bytes() == CONTENT
    # The last is of hf_hub_download, which links the file.
    asked = ["hub HEAD", "hub GET", "store GET", "hub HEAD"]
    assert [f"{r.host} {r.method}" for r in hub.requests] == asked
    assert hub.requests[1].path == f"/owner/repo/resolve/{COMMIT}/model.gguf"
    # Other tools find the file, too.
    assert hf_hub_download("owner/repo", "model.gguf", cache_dir=cache) == str(path)
    assert blobs(cache) == {SHA256: 3_072_000}
    assert len(hub.byte_requests()) == 1
    hub.requests.clear()
    hub.stop()
    assert resolve("tiny", registry=REGISTRY) == path
    assert resolve(SOURCE, registry={}) == path
    assert hub.requests == []


@pytest.mark.parametrize(
    ("drop_after", "starts"),
    [
        ([1_000_000, 500_000], [0, 1_000_000, 1_500_000]),
        # The retry count restarts after every byte received.
        ([0, 0, 1_000_000, 0, 1_000_000, 0], [0, 0, 0, 1_000_000, 1_000_000, 2_000_000, 2_000_000]),
    ],
)
def test_a_dropped_download_resumes_where_it_stopped(
    hub: HubServer, drop_after: list[int], starts: list[int]
) -> None:
    hub.drop_after = drop_after
    assert fetched() == CONTENT
    ranges = [request.range for request in hub.byte_requests()]
    assert ranges == [f"bytes={start}-" if start else None for start in starts]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "try again to resume the download"),  # the connection is lost
        (KeyboardInterrupt(), "^$"),
        (OSError(errno.ENOSPC, "disk full"), "^the disk is too full .* try again to resume"),
    ],
)
def test_what_ends_a_download_keeps_the_bytes_received_and_the_next_one_resumes(
    hub: HubServer, cache: Path, error: BaseException | None, reason: str
) -> None:
    class Interrupting(Bar):
        def update(self, n: float, /) -> None:
            super().update(n)
            if error is not None and self.at >= 1_000_000:
                raise error

    hub.drop_after = [] if error else [2_000_000, *[0] * 10]
    with pytest.raises((KeyboardInterrupt, DownloadFailed), match=reason):
        fetched(bar=Interrupting)
    [(name, size)] = blobs(cache).items()
    assert (name, size) == (PARTIAL, Bar.made[0].at)
    hub.drop_after = []
    assert fetched() == CONTENT
    assert hub.byte_requests()[-1].range == f"bytes={size}-"
    assert blobs(cache) == {SHA256: 3_072_000}


def test_a_server_without_ranges_sends_the_whole_file_again(hub: HubServer, cache: Path) -> None:
    hub.ranges = False
    hub.drop_after = [2_000_000]
    assert fetched(bar=Bar) == CONTENT
    assert [bar.at for bar in Bar.made] == [3_072_000]


@pytest.mark.parametrize("left", [CONTENT, b"another beginning", CONTENT + b"too long"])
def test_a_partial_file_is_completed_and_checked(hub: HubServer, cache: Path, left: bytes) -> None:
    folder = cache / "models--owner--repo" / "blobs"
    folder.mkdir(parents=True)
    (folder / PARTIAL).write_bytes(left)
    if len(left) < len(CONTENT):
        assert "owner/repo/model.gguf is corrupt" in failure()
    assert fetched() == CONTENT
    assert left != CONTENT or hub.byte_requests() == []


def test_wrong_bytes_are_removed_and_dangling_links_fetched_again(
    hub: HubServer, cache: Path
) -> None:
    hub.wrong_bytes = 1
    reason = rf"model.gguf is corrupt: .* but the hub's is {SHA256}. .*deleted; try again"
    assert re.search(reason, failure())
    assert blobs(cache) == {}
    assert fetched() == CONTENT
    hub.status = [429]  # a busy hub is asked again
    path = resolve("tiny", registry=REGISTRY)
    (cache / "models--owner--repo" / "blobs" / SHA256).unlink()
    assert resolve("tiny", registry=REGISTRY) == path
    assert path.read_bytes() == CONTENT


def test_progress_covers_every_byte_and_is_shown_only_in_a_terminal(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fetched(bar=Bar)
    shutil.rmtree(cache)
    [bar] = Bar.made
    named = {"total": 3_072_000, "desc": "model.gguf", "disable": None}
    assert bar.keywords == {**named, "unit": "B", "unit_scale": True}
    assert (bar.at, bar.closed) == (3_072_000, True)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shows=is_terminal: shows, raising=False)
        resolve("tiny", registry=REGISTRY)
        assert ("model.gguf: 100%" in capsys.readouterr().err) is is_terminal
        shutil.rmtree(cache)


def test_two_downloads_of_a_file_at_once_fetch_it_once(hub: HubServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: resolve("tiny", registry=REGISTRY, bar=Bar), range(2)))
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert len(hub.byte_requests()) == 1


@pytest.mark.parametrize(
    ("how", "value", "message", "n_requests"),
    [
        ("missing", 1, "the server sent too few bytes", None),
        ("status", [503], "{} returned 503 for owner/repo/model.gguf; wait a while, then", None),
        ("status", [403], "{} denied access to owner/repo/model.gguf (403); put a token", 1),
        ("checksums", False, "gives no SHA-256 for owner/repo/model.gguf (etag 'v1')", 0),
    ],
)
def test_a_hub_that_fails_is_reported(
    hub: HubServer, how: str, value: object, message: str, n_requests: int | None
) -> None:
    setattr(hub, how, value)
    assert message.format(hub.url) in failure()
    assert n_requests in (None, len(hub.byte_requests()))


def test_a_gated_repository_needs_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("owner/repo")
    access = f"request access at {hub.url}/owner/repo.*{hub.url}/settings/tokens in HF_TOKEN"
    assert re.search(f"owner/repo is gated: {access}", failure())
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetched() == CONTENT
    tokens = {(request.host, request.authorization) for request in hub.requests[-3:]}
    assert tokens == {("hub", "Bearer hf_secret"), ("store", None)}


def test_a_missing_repository_revision_or_file_is_named(hub: HubServer, cache: Path) -> None:
    for source, message in (
        ("hf:owner/other/a.gguf", "no repository 'owner/other' that you can access"),
        ("hf:owner/repo/a.gguf", "has no file 'a.gguf' at revision 'main'"),
        ("hf:owner/repo/model.gguf@v2", "has no revision 'v2'"),
    ):
        assert message in failure(source)
    assert hub.byte_requests() == []
    path = resolve(f"{SOURCE}@{COMMIT}", registry={})
    assert path.read_bytes() == CONTENT
    assert not (cache / "models--owner--repo" / "refs").exists()


def test_a_full_disk_a_closed_folder_or_a_refused_connection_is_named(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(ROOT)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
        reason = "^the disk is too full for .*: .*3.1 MB are needed, 1.0 MB are free.*HF_HOME"
        assert re.search(reason, failure())
    assert hub.byte_requests() == []
    shutil.rmtree(cache)
    cache.write_text("a file where a folder should be")
    assert f"cannot save owner/repo/model.gguf in {cache}: " in failure()
    cache.unlink()
    hub.stop()
    assert f"connection to {hub.url} failed during the download of owner/repo/m" in failure()


# The environment is read when huggingface_hub is imported, so these ask a fresh interpreter.


def run(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"from speculation.registry import resolve; print(resolve({SOURCE!r}))"
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_hf_endpoint_hf_home_and_hf_token_are_respected(hub: HubServer, tmp_path: Path) -> None:
    done = run(tmp_path / "home", HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "home" / "hub"), done.stderr
    assert path.read_bytes() == CONTENT
    assert hub.requests[0].authorization == "Bearer hf_secret"
    assert "B/s" not in done.stderr  # no terminal: no progress bar

    # Offline, and nothing at that address: only the cache can answer.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        again = run(tmp_path / "home", HF_ENDPOINT=nobody, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout


def test_offline_mode_makes_no_request_and_says_what_to_do(hub: HubServer, tmp_path: Path) -> None:
    done = run(tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert hub.requests == []
    cache = tmp_path / "home" / "hub"
    last = done.stderr.strip().splitlines()[-1]
    assert f"owner/repo/model.gguf is not in the cache {cache} and HF_HUB_OFFLINE is set" in last
    assert f"{hub.url}/owner/repo/blob/main/model.gguf elsewhere and give its path" in last
