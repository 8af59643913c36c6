"""Closing a context or a model that is in use. Programs of their own show a crash as a failure."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import pytest

from batching.errors import ContextError, ModelError
from batching.llama.context import Context
from batching.llama.model import Model
from batching.llama.sampler import SamplerChain
from batching.rows import Rows, text_rows
from tests.support.exact import EXACT

PROGRAM = """
import sys, threading, time
from batching.errors import ContextError, ModelError
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import text_rows

model = Model(sys.argv[1])
context = Context(model, ContextParams(n_ctx=512, n_threads=1, flash_attn="off"))
started, stopped = threading.Event(), threading.Event()

def write():
    try:
        while True:
            context.decode(text_rows([5] * 256, 0, [False] * 255 + [True])).logits(255).sum()
            context.decode_row(6, 256, range(1)).logits(0).sum()
            context.decode_row(6, 257, range(1)).argmax(0)
            context.seq_rm(-1, 0, -1)
            model.tokenize("the cat")
            started.set()
    except (ContextError, ModelError) as error:
        print(error)
        stopped.set()

thread = threading.Thread(target=write, daemon=True)
thread.start()
started.wait(60)
"""
WAIT = "stopped.wait(60); thread.join(60)"


def output_of(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (f"context.close(); {WAIT}", "the context of"),
        (f"model.close(); {WAIT}", "the model"),
        (f"model.close(); context.close(); {WAIT}", "the model"),
        ("sys.exit(0)", ""),
    ],
)
def test_closing_under_a_decode_is_no_crash(end: str, message: str, tiny_model: Path) -> None:
    said = output_of(PROGRAM + end, tiny_model)
    assert said.startswith(message)
    assert not message or "is closed" in said


def test_an_open_context_and_its_model_are_freed_at_exit_in_that_order(tiny_model: Path) -> None:
    program = """
import sys
import llama_cpp.llama_cpp as C
free_model, free_context = C.llama_model_free, C.llama_free
C.llama_model_free = lambda handle: (free_model(handle), print("model"))
C.llama_free = lambda handle: (free_context(handle), print("context"))
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
model = Model(sys.argv[1])
context = Context(model, ContextParams(flash_attn="off"))
"""
    assert output_of(program, tiny_model) == "context\nmodel\n"


@pytest.mark.parametrize("close_model", [False, True])
def test_every_method_of_a_closed_context_says_so(tiny_model: Path, close_model: bool) -> None:
    model = Model(tiny_model)
    context = Context(model, EXACT)
    output = context.decode(text_rows([5, 6], 0, [True, True]))
    state = context.copy_out(0)
    (model if close_model else context).close()
    uses: list[Callable[[], Any]] = [
        lambda: context.decode(text_rows([5], 0, [True])),
        lambda: context.decode_row(5, 0, range(1)),
        lambda: context.encode(np.zeros((1, 32), np.float32)),
        lambda: context.want_hidden(True),
        lambda: context.want_layers((0,)),
        lambda: context.seq_rm(0, 0, 1),
        lambda: context.seq_rm(-1, 0, -1),
        lambda: context.seq_cp(0, 1, 0, 1),
        lambda: context.save(0),
        lambda: context.restore(0, state, 1),
        lambda: context.copy_out(0),
        lambda: context.copy_in(0, state),
        lambda: context.can_repeat,
        lambda: context.repeat(100),
        lambda: context.use_threads(1),
        lambda: output.logits(0),
        lambda: output.argmax(0),
        lambda: output.argmaxes(0, 2),
    ]
    error = ModelError if close_model else ContextError
    for use in uses:
        with pytest.raises(error, match="is closed; "):
            use()
    context.close()
    model.close()
    for ask in (lambda: model.tokenize("a"), lambda: model.metadata("general.name")):
        with pytest.raises(ModelError, match="is closed; load it again"):
            ask()


def test_closing_waits_for_a_decode(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(*_: object) -> int:
        inside.set()
        leave.wait(60)
        return 0

    with Model(tiny_model) as model:
        context = Context(model, EXACT)
        monkeypatch.setattr("batching.llama.context._llama_decode", slow)
        decoding = threading.Thread(target=lambda: context.decode(text_rows([5], 0, [False])))
        decoding.start()
        inside.wait(60)
        closing = threading.Thread(target=model.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        leave.set()
        closing.join(60)
        decoding.join(60)
        assert not closing.is_alive()


def test_a_callback_can_close_a_context_and_logits_stay_readable(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batching.llama.abort._SLOW", 0.0)
    monkeypatch.setattr("batching.llama.abort._POLL_SECONDS", 0.0)
    with Model(tiny_model) as model:
        context = Context(model, EXACT)

        def watch(_share: float) -> bool:
            context.close()
            return False

        with pytest.raises(ContextError, match="is closed"):
            context.decode(Rows([5] * 9, range(9), [range(1)] * 9, [True] * 9), watch)
    with Model(tiny_model) as model:
        context = Context(model, EXACT)
        logits = context.decode(text_rows([5], 0, [True])).logits(0)
        before = logits.copy()
        context.close()
        model.close()
        np.testing.assert_array_equal(logits, before)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_is_told_to_load_the_model_again(tiny_model: Path) -> None:
    fork = """
import os
child = os.fork()
if not child:
    try:
        context.decode(text_rows([5], 0, [True]))
    except ModelError as error:
        print("child:", error, flush=True)
    sys.exit(0)
print("status:", os.waitpid(child, 0)[1])
context.close()
"""
    said = output_of(PROGRAM + fork + WAIT, tiny_model)
    assert "is closed; load it again\nstatus: 0\n" in said


def test_a_sampler_is_freed_with_its_owner(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[object] = []
    free = C.llama_sampler_free

    def counted(link: object) -> None:
        freed.append(link)
        free(link)

    monkeypatch.setattr(C, "llama_sampler_free", counted)
    with Model(tiny_model) as model:
        sampler = SamplerChain(model).add("penalties", 64, 1.1, 0.0, 0.0).greedy()
        assert not freed
        del sampler
        assert len(freed) == 2  # the chain and its last link
