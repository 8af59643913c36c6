"""RPC workers: models computed by other processes, as they would be on other machines."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.worker.messages import ChatRequest, Done, Failed, Loaded, ModelSpec, Tokens
from app.worker.remote import RemoteBackend
from batching.errors import ModelError
from batching.llama import rpc
from speculation.engine import Engine
from tests.support.paths import ROOT
from tests.support.rpc_worker import worker

# In a process of its own, which a lost worker would end.
COMPARE = """
import json, sys
from speculation.engine import Engine
from tests.support.exact import EXACT
model, draft, rpc, *methods = sys.argv[1:]
texts = []
for workers in ("", rpc):
    with Engine.load(model, EXACT, draft_model=draft, rpc=workers) as engine:
        texts.append([engine.chat("a cat", method=m, max_tokens=40).run().text for m in methods])
        names = [(device.name, device.description) for device in engine.model.devices]
        draft_names = [device.name for device in engine.draft.model.devices]
print(json.dumps([texts[0], texts[1], names, draft_names]))
"""
LOAD = """
import sys
from speculation.engine import Engine
Engine.load(sys.argv[1], rpc=sys.argv[2]).close()
"""
HEADS = """
import sys, tempfile
from pathlib import Path
from speculation.engine import Engine
from tests.support.tiny_heads import attached, blocks, hybrid, mtp, states
from tests.support.exact import EXACT
for written in (states, blocks, mtp, hybrid, attached):
    with tempfile.TemporaryDirectory() as folder:
        model, heads, methods = written(Path(folder))
        with Engine.load(model, EXACT, heads=heads, draft_model=model, rpc=sys.argv[1]) as engine:
            prompt = [5 + i % 20 for i in range(30)]
            plain = engine.generate(prompt, method="ar", max_tokens=30).run().token_ids
            for method in methods:
                found = engine.generate(prompt, method=method, max_tokens=30).run()
                assert found.token_ids == plain, method
                print(method)
"""
EXPERTS = """
import sys
from tests.support.experts import check_experts
one, two = sys.argv[1:]
check_experts({"rpc": [one, two]}, {"rpc": one}, "RPC")
"""
CAT = ({"role": "user", "content": "a cat"},)
ENDLESS = {"grammar": "root ::= [a-z] root"}
METHODS = ("ar", "auto", "prompt-lookup", "suffix", "recycling", "lookahead", "jacobi", "draft")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="not tried on Windows")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_model_computed_by_workers_writes_what_it_writes_alone(
    n: int, tiny_model: Path, tiny_draft: Path
) -> None:
    with worker() as one, worker() as two, worker() as three:
        workers = [f"127.0.0.1:{port}" for port in (one, two, three)[:n]]
        arguments = [str(tiny_model), str(tiny_draft), ",".join(workers), *METHODS]
        done = run("-c", COMPARE, *arguments)
    assert done.returncode == 0, done.stderr
    alone, together, devices, draft_devices = json.loads(done.stdout)
    assert together == alone
    assert devices == [[f"RPC{i}", address] for i, address in enumerate(workers)]
    assert draft_devices == []


def test_heads_draft_for_a_model_computed_by_workers() -> None:
    with worker() as one, worker() as two:
        done = run("-c", HEADS, f"127.0.0.1:{one},127.0.0.1:{two}")
    assert done.returncode == 0, done.stderr
    methods = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert {"eagle-1", "eagle-2", "eagle-3", "medusa", "redrafter", "dflash", "mtp"} < methods


def test_experts_stay_here_while_workers_have_the_rest_of_the_layers() -> None:
    with worker() as one, worker() as two:
        done = run("-c", EXPERTS, f"127.0.0.1:{one}", f"127.0.0.1:{two}")
    assert done.returncode == 0, done.stderr


def test_weights_are_sent_to_a_worker_with_a_cache_only_once(
    tiny_model: Path, cache_folder: Path
) -> None:
    with worker("--cache") as port:
        assert run("-c", LOAD, str(tiny_model), f"127.0.0.1:{port}").returncode == 0
        kept = sorted((cache_folder / "rpc").iterdir())
        assert run("-c", LOAD, str(tiny_model), f"127.0.0.1:{port}").returncode == 0
    assert sorted((cache_folder / "rpc").iterdir()) == kept


def test_a_worker_that_cannot_be_used_is_an_error_that_says_why(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:  # nobody else can take its port, and nobody listens there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        reason = rf"127.0.0.1:{port} cannot be used: Failed to connect"
        with pytest.raises(ModelError, match=reason):
            Engine.load(tiny_model, rpc=f"127.0.0.1:{port}")
    with pytest.raises(ModelError, match="'127.0.0.1' is no address of a worker; give HOST:PORT"):
        Engine.load(tiny_model, rpc="127.0.0.1")
    with (
        old_worker() as port,
        pytest.raises(ModelError, match="RPC server version mismatch: 1.2.3"),
    ):
        Engine.load(tiny_model, rpc=f"127.0.0.1:{port}")
    monkeypatch.setattr(rpc, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ModelError, match="did not answer within 1 s; it serves one program"):
            Engine.load(tiny_model, rpc=f"127.0.0.1:{port}")


@contextmanager
def old_worker() -> Iterator[int]:
    """A worker of another version, which answers a greeting and no more; its port."""

    def greet() -> None:
        client, _ = server.accept()
        with client, client.makefile("rb") as asked:
            (n,) = struct.unpack("<xQ", asked.read(9))  # the command and the size of what follows
            asked.read(n)
            client.sendall(struct.pack("<Q4B", 4 + n, 1, 2, 3, 0) + bytes(n))
            client.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet, daemon=True).start()
        port: int = server.getsockname()[1]
        yield port


def test_a_worker_that_dies_ends_the_reply_and_its_successor_serves_the_next(
    tiny_model: Path,
) -> None:
    backend = RemoteBackend()
    try:
        with worker() as port:
            spec = ModelSpec(
                str(tiny_model), n_threads=1, flash_attn="off", rpc=f"127.0.0.1:{port}"
            )
            assert isinstance(list(backend.load(spec))[-1], Loaded)
            running = backend.reply(ChatRequest("one", CAT, sampling=ENDLESS))
            while not isinstance(next(running), Tokens):
                pass
        failed = list(running)[-1]
        assert isinstance(failed, Failed)
        assert failed.message.startswith("The engine's process ended: SIGABRT (ggml-rpc.cpp:")
        assert "Remote RPC server crashed or returned malformed response" in failed.message
        failed = list(backend.reply(ChatRequest("one", CAT, max_tokens=4)))[-1]
        assert isinstance(failed, Failed)
        assert f"the worker 127.0.0.1:{port} cannot be used: Failed to connect" in failed.message
        with worker(port=port):
            assert isinstance(list(backend.load(spec))[-1], Loaded)
            assert isinstance(list(backend.reply(ChatRequest("one", CAT, max_tokens=4)))[-1], Done)
    finally:
        assert backend.close()


def test_the_command_lists_the_devices_of_this_machine_and_of_workers() -> None:
    with worker() as port:
        done = run("-m", "app.cli", "devices", "--rpc", f"127.0.0.1:{port}")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("CPU: ")
    assert lines[-1].startswith(f"RPC0: 127.0.0.1:{port} (gpu, ")


def test_a_worker_open_to_the_network_warns_and_one_on_a_taken_port_does_not_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("-m", "app.cli", "rpc-worker", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: 127.0.0.1, port {port}: in use, or not an address of this machine; change --port "
        "or --host\n"
    )
    open_worker = ["rpc-worker", "--host", "0.0.0.0", "--port", str(port)]
    command = [sys.executable, "-m", "app.cli", *open_worker]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "neither asks who connects nor encrypts" in process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
