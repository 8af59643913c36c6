"""Measures our server beside llama-server on the same GGUF, one client or several at a time.

    python -m tools.compare MODEL --llama-server DIR/llama-server --clients 1 4 16 --rounds 8

For each number of clients, all contenders' servers run, with as many slots. In a round each of them
in turn gets the same chats, greedy and streamed; the next round begins with another contender and
has other chats, so that neither drift nor a cache favours any. In a round each client sends one
chat, or with ``--chats N`` about N one after another: whoever has its answer sends the next. Time
counts from the first request to the last token, so prompts are included. Replies of one length end
in the same step wherever all texts advance alike, and the next prompts are then read together; with
two numbers, ``--n-predict LOW HIGH``, each chat has a limit of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from batching.llama.library import library_folder
from speculation.bench.prompt_file import read_prompts

Body = dict[str, object]  # of a request

OURS = "ours "  # before the names of our methods
_SETTLED_SECONDS = 30  # without a new measurement
_START_SECONDS = 120.0
_WARM_UP = "Say hello."  # no prompt of a round begins with it
_LIBRARY = re.compile(r"(lib)?(llama|ggml(-[\w-]+)?)\.(so|dylib|dll)")


@dataclass(frozen=True)
class Reply:
    """A streamed reply: its text, how many tokens it has, and the seconds to the first."""

    text: str
    n_tokens: int
    first: float


@dataclass(frozen=True)
class Cell:
    """What one contender did with one number of clients in one round.

    ``seconds`` are those of all requests together.
    """

    contender: str
    clients: int
    round: int
    replies: Sequence[Reply]
    seconds: float

    @property
    def n_tokens(self) -> int:
        return sum([reply.n_tokens for reply in self.replies])

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return self.n_tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parse(arguments)
    contenders = [name for name in flags.theirs if flags.llama_server is not None]
    contenders += [OURS + method for method in flags.methods]
    prompts = [prompt.turns[0] for file in flags.prompts for prompt in read_prompts(file)]
    random.Random(1).shuffle(prompts)
    if flags.llama_server is not None:
        print(libraries(library_folder(), flags.llama_server.parent))
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as cache:
        for clients in flags.clients:
            if flags.methods:
                _settle(flags, clients, cache)
            with ExitStack() as stack:
                ports = {
                    name: stack.enter_context(_server(flags, name, clients, cache))
                    for name in contenders
                }
                n_asked = clients * flags.chats
                for number in range(min(flags.rounds, len(prompts) // n_asked)):
                    lengths = random.Random(number)
                    asked = [
                        _chat(prompt, lengths.randint(flags.n_predict[0], flags.n_predict[-1]))
                        for prompt in prompts[number * n_asked : (number + 1) * n_asked]
                    ]
                    turn = number % len(contenders)
                    cells += [
                        _measure(flags, name, ports[name], number, asked, clients)
                        for name in contenders[turn:] + contenders[:turn]
                    ]
            print(report([cell for cell in cells if cell.clients == clients]), flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps([asdict(cell) for cell in cells]), encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description=__doc__)
    add = parser.add_argument
    add("model", help="a GGUF file")
    add("--llama-server", type=Path, help="llama.cpp's program; without it, only ours is measured")
    add("--draft-model", help="for draft-simple there, and draft and auto here")
    add(
        "--theirs",
        nargs="*",
        default=["none", "ngram-simple", "ngram-mod"],
        help="llama-server's --spec-type (%(default)s)",
    )
    add("--methods", nargs="*", default=["ar", "auto"], help="ours (%(default)s)")
    add("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="how many at a time")
    add("--rounds", type=int, default=8, help="at most, as there are prompts (%(default)s)")
    add("--chats", type=int, default=1, help="of each client in a round (%(default)s)")
    add("--n-predict", nargs="+", type=int, default=[64], help="of a reply: a number, or two")
    add("--ctx", type=int, default=1024, help="context of each slot")
    add("--threads", type=int, default=2)
    add("--prompts", nargs="+", default=["builtin", "novel"], help="prompt files or built-in ones")
    add("--json", type=Path)
    return parser.parse_args(arguments)


def libraries(ours: Path, theirs: Path) -> str:
    """Whether both sides run the same build of llama.cpp."""
    here, there = (
        {file.name: file.read_bytes() for file in folder.iterdir() if _LIBRARY.fullmatch(file.name)}
        for folder in (ours, theirs)
    )
    names = sorted({*here, *there})
    unlike = [name for name in names if here.get(name) != there.get(name)]
    if not there:
        return f"libraries: none in {theirs}, so their build cannot be compared with ours"
    if unlike:
        return (
            f"libraries: NOT the same build ({', '.join(unlike)} differ), which affects the "
            f"ratios; to use theirs for both sides, set LLAMA_CPP_LIB_PATH={theirs}"
        )
    return "libraries: identical on both sides"


def _measure(
    flags: argparse.Namespace,
    contender: str,
    port: int,
    number: int,
    chats: Sequence[Body],
    n_clients: int,
) -> Cell:
    own: Body = {}
    if contender.startswith(OURS):
        own["speculation"] = {"method": contender.removeprefix(OURS)}
    if not number:
        _ask(port, _chat(_WARM_UP, flags.n_predict[-1]) | own)
    with ThreadPoolExecutor(n_clients) as clients:
        start = time.perf_counter()
        asked = list(clients.map(lambda chat: _ask(port, chat | own), chats))
        seconds = time.perf_counter() - start
    replies = [_reply(*answer) for answer in asked]
    return Cell(contender, n_clients, number, replies, seconds)


def _settle(flags: argparse.Namespace, slots: int, cache: str) -> None:
    """Let our server measure what it measures while idle, which would disturb the others.

    Twice, because the second start takes the settings that the first one found.
    """
    for _ in range(2):
        with _server(flags, OURS + flags.methods[0], slots, cache) as port:
            _ask(port, _chat(_WARM_UP, 8))
            changed = time.time()
            while time.time() < changed + _SETTLED_SECONDS:
                time.sleep(1)
                files = Path(cache).rglob("*.json")
                changed = max([changed, *(file.stat().st_mtime for file in files)])


@contextmanager
def _server(flags: argparse.Namespace, contender: str, slots: int, cache: str) -> Iterator[int]:
    """The port of a server of ``contender`` that is ready."""
    port = free_port()
    ctx = str(slots * flags.ctx)
    is_ours = contender.startswith(OURS)
    if is_ours:
        command = [sys.executable, "-m", "app", "--no-page", "--no-browser", "--model"]
        command += [flags.model, "--ctx", ctx]
        if flags.draft_model is not None:
            command += ["--draft-model", flags.draft_model]
    else:
        command = [str(flags.llama_server), "-m", flags.model, "-c", ctx, "--no-webui"]
        command += ["--spec-type", contender]
        if contender.startswith("draft"):
            command += ["-md", flags.draft_model]
    command += ["--port", str(port), "--parallel", str(slots), "--threads", str(flags.threads)]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    if not is_ours:
        environment["LD_LIBRARY_PATH"] = str(flags.llama_server.parent)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            _wait(port, process)
            yield port
        except Exception:
            output.seek(0)
            sys.stderr.buffer.write(output.read()[-2000:])
            raise
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} is not ready")


def _chat(prompt: str, n_predict: int) -> Body:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_predict,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _ask(port: int, body: Body) -> tuple[list[bytes], float]:
    """The lines of a streamed reply, and the seconds to its first token.

    They are parsed later: a client must not take the server's time.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:500]!r}")
    first, lines = 0.0, []
    for line in response:
        if not first and b'"content":"' in line.replace(b": ", b":") and b'""' not in line:
            first = time.perf_counter() - start
        lines.append(line)
    connection.close()
    return lines, first or time.perf_counter() - start


def _reply(lines: Sequence[bytes], first: float) -> Reply:
    events = [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: {")]
    pieces = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return Reply("".join(filter(None, pieces)), usage["completion_tokens"], first)


def report(cells: Sequence[Cell]) -> str:
    """For one number of clients: medians over the rounds, and of the ratios within a round.

    Texts are compared with those of the first contender.
    """
    rounds: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.round):
        rounds.setdefault(cell.contender, []).append(cell)
    speeds = {name: [cell.speed for cell in own] for name, own in rounds.items()}
    theirs = [name for name in rounds if not name.startswith(OURS)]
    best = max(theirs, key=lambda name: median(speeds[name]), default=None)
    base = cells[0].contender
    texts = {name: [r.text for cell in own for r in cell.replies] for name, own in rounds.items()}
    lines = [f"{cells[0].clients} clients, {len(speeds[base])} rounds"]
    for name, own in rounds.items():
        first = sorted([reply.first for cell in own for reply in cell.replies])
        total = sum([cell.n_tokens for cell in own]) / sum([cell.seconds for cell in own])
        line = f"  {name}: {median(speeds[name]):.1f} tokens/s, {total:.1f} over all; first token "
        line += f"{median(first):.2f} s, p99 {first[int(0.99 * len(first))]:.2f}"
        for other in (best, OURS + "ar"):
            if name.startswith(OURS) and other in speeds and other != name:
                ratios = [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
                line += f"; / {other} {median(ratios):.3f}"
        if name != base:
            same = sum([a == b for a, b in zip(texts[name], texts[base], strict=True)])
            line += f"; {same} of {len(texts[name])} texts as {base}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
