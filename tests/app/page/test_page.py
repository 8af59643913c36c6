"""The page without a browser: its frame, fields and flags."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest
from fastapi import FastAPI

from app.page.settings import Settings, read_settings
from batching.llama.model import ALL_LAYERS
from speculation.registry import PAIRED
from tests.support.fake_backend import FakeBackend

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from app.page import ui
    from app.page.fields import settings_fields
    from app.start import main, parse_flags


def made(build: Callable[[], None]) -> gr.Blocks:
    """Blocks, made in a running event loop, or Gradio leaves one open."""

    async def make() -> gr.Blocks:
        with gr.Blocks() as page:
            build()
        return page

    return asyncio.run(make())


def fields(usual: dict[str, float] | None = None, **settings: Any) -> dict[str, tuple[Any, Any]]:
    """For each setting the value that its field shows, and the one it has if it is not given."""
    page = made(lambda: settings_fields(settings, FakeBackend().methods(), usual or {}))
    values = {one["id"]: one["props"].get("value") for one in page.config["components"]}
    found = {}
    for event in page.config["dependencies"]:
        told = re.fullmatch(r"\(value\) => page\.set\((.+?), value, (.+)\)", str(event["js"]))
        assert told is not None
        assert not event["queue"]
        found[json.loads(told[1])] = values[event["inputs"][0]], json.loads(told[2])
    return found


def test_fields_show_what_is_set_and_else_what_the_server_takes_as_the_default() -> None:
    shown = fields(method="guess", parameters={"width": 2}, sampling={"top_k": 40, "gone": 1})
    assert shown["parameters.width"] == (2, 4)
    assert shown["parameters.deep"] == (True, True)
    assert shown["sampling.top_k"] == (40, 0)
    assert "parameters.width" not in fields(method="ar")
    own = fields(method="ar", sampling={"top_k": 40}, usual={"top_k": 20, "temperature": 0.7})
    assert (own["sampling.top_k"], own["sampling.temperature"]) == ((40, 20), (0.7, 0.7))
    nested: dict[str, Any] = {"method": "guess", "parameters": {}, "sampling": {}}
    for name, (_, usual) in shown.items():
        kind, _, key = name.rpartition(".")
        (nested[kind] if kind else nested)[key] = usual
    read = read_settings(nested, FakeBackend().methods())
    plain = read_settings({"method": "guess"}, FakeBackend().methods())
    assert read.sampling.items() >= plain.sampling.items() == {"seed": 0}.items()
    assert (read.method, read.max_tokens, read.thinking, read.leave_out) == (
        ("guess", Settings().max_tokens, None, True)
    )


def answers(*asked: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers of the frame to requests, each with its method, path and what else it has."""

    async def ask() -> list[httpx.Response]:
        app = FastAPI()
        ui.mount(app, ui.build(FakeBackend(), "guess"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, **more) for method, path, more in asked]

    return asyncio.run(ask())


def test_the_frame_holds_no_connection_and_its_files_are_compressed_and_kept() -> None:
    paths = ("/", "/config", "/page/transcript.js", "/page/math.woff2")
    document, config, script, font = answers(*(("GET", path, {}) for path in paths))
    assert font.content.startswith(b"wOF2")
    assert "page/page.css" in document.text
    assert [one.headers.get("content-encoding") for one in (document, script)] == ["gzip"] * 2
    assert not config.json()["connect_heartbeat"]
    assert not any(event["queue"] for event in config.json()["dependencies"])
    known = {"headers": {"If-None-Match": script.headers["etag"]}}
    assert answers(("GET", "/page/transcript.js", known))[0].status_code == 304


def test_gradio_is_asked_for_fields_alone_and_odd_settings_have_theirs() -> None:
    usual = {"data": ['{"method": "guess"}'], "fn_index": 0, "trigger_id": 5, "session_hash": "a"}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 200),
        ({"data": ['{"method": 5, "sampling": {"top_k": [], "temperature": "x"}}']}, 200),
        ({"data": ['{"sampling": {"temperature": 1e999, "seed": true}, "thinking": []}']}, 200),
        ({"data": ['{"system": {}, "max_tokens": "x", "parameters": 5, "method": "guess"}']}, 200),
        ({"event_data": {"x": 5}, "simple_format": True, "batched": True}, 200),
        *[({"data": data}, 400) for data in (["5"], ["[" * 10_000], ["{}", "{}"], 5, [5], None)],
        *[({"fn_index": index}, 400) for index in (1, -1, "x", None, 2**70)],
        *[({"trigger_id": number}, 400) for number in (2**70, -1, "x")],
        ({"session_hash": []}, 400),
    ]
    path = "/gradio_api/run/predict"
    found = answers(*(("POST", path, {"json": {**usual, **change}}) for change, _ in cases))
    for (change, status), answer in zip(cases, found, strict=True):
        assert answer.status_code == status, (change, answer.text)
        assert ("Temperature" in answer.text) == (status == 200)


# The program


def test_flags_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse_flags(["--model", "m.gguf", "--method", "lookahead:window=5", "--no-browser"])
    assert (flags.host, flags.port, flags.spec.n_ctx) == ("127.0.0.1", None, 0)
    assert (flags.spec.model, flags.spec.draft_model, flags.spec.heads) == ("m.gguf", None, ())
    assert (flags.method, parse_flags([]).method) == ("lookahead:window=5", None)
    found = [
        parse_flags(given).spec.n_cpu_moe for given in ([], ["--cpu-moe"], ["--n-cpu-moe", "3"])
    ]
    assert found == [None, ALL_LAYERS, 3]
    paired = parse_flags(["--draft-model", "--heads", "--no-mtp"]).spec
    assert (paired.draft_model, paired.heads, paired.mtp) == (PAIRED, (PAIRED,), False)
    with pytest.raises(SystemExit):
        parse_flags(["--method", "lokahead"])
    assert "give one of auto, ar, " in capsys.readouterr().err
    for wrong, told in (
        ("--ctx -5", "n_ctx is -5; give 0 to 2147483392"),
        ("--threads 0", "n_threads is 0; give 1 to 512"),
        ("--threads 100000", "n_threads is 100000; give 1 to 512"),
        ("--gpu-layers -5", "argument --gpu-layers: invalid value '-5'; give an integer from 0"),
        ("--n-cpu-moe -5", "argument --n-cpu-moe: invalid value '-5'; give an integer from 0"),
        ("--parallel 0", "argument --parallel: invalid value '0'; give an integer from 1 to 255"),
        ("--kv-type q8_0 --flash-attn off", "a q8_0 KV cache needs flash attention"),
        ("--kv-type q4_0 --flash-attn off", "a q4_0 KV cache needs flash attention"),
    ):
        with pytest.raises(SystemExit):
            parse_flags(wrong.split())
        assert f"error: {told}" in capsys.readouterr().err


def test_keys_come_from_flags_and_a_file_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECULATION_API_KEY", "a key")
    file = tmp_path / "keys"
    file.write_bytes("\ufefferster\r\n\n  schlüssel \n".encode())
    for given, keys in (
        ([], ["a key"]),
        (["--api-key", "b"], ["b"]),
        (["--api-key", "b", "--api-key-file", str(file)], ["b", "erster", "schlüssel"]),
    ):
        assert parse_flags(given).api_key == keys
    file.write_text("\n")
    for name, told in ((file, "has no key"), (tmp_path, "cannot read"), ("/none", "No such file")):
        with pytest.raises(SystemExit):
            parse_flags(["--api-key-file", str(name)])
        assert told in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused_before_trying_any_port() -> None:
    with pytest.raises(SystemExit, match=r"--host 192\.0\.2\.1 is not an address of this machine"):
        main(["--host", "192.0.2.1"])
