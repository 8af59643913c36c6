"""Errors: their messages, and that the engine stays usable after them; Ctrl-C."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import (
    ContextError,
    GrammarError,
    InvalidParameter,
    MissingResource,
    ModelError,
    OutOfMemory,
    PromptTooLong,
    SpeculationError,
    UnsupportedModel,
)
from batching.llama import model as model_module
from batching.llama.context import Context, ContextParams
from batching.llama.interrupts import deferred_interrupts
from batching.llama.model import Model
from batching.watched import GivenUp, checkpoint
from speculation import runtime as runtime_module
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT, PROMPT
from tests.support.tiny_gguf import N_TINY, write_learned_positions_gguf, write_tiny_gguf


def test_a_file_that_is_missing_no_gguf_or_of_an_unknown_architecture_is_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=r"file not found: /nowhere/x\.gguf; check the path"):
        Model("/nowhere/x.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="is not a model in the GGUF format"):
        Model(path)
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="perceptron")
    with pytest.raises(UnsupportedModel, match="perceptron.*newer llama-cpp-python"):
        Model(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_the_error_for_a_truncated_gguf_says_to_download_it_again(
    tiny_model: Path, tmp_path: Path, share: float
) -> None:
    path, data = tmp_path / "half.gguf", tiny_model.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ModelError, match="incomplete.*download it again"):
        Model(path)


def test_a_prompt_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"holds 512; shorten it, since .* trained for 512"):
        engine.generate("a" * 600, max_tokens=1).run()
    assert engine.generate(PROMPT, max_tokens=3).run().finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_ctx": 2_000_000_000}, r"context of 2,000,000,000 tokens.*lower n_ctx"),
        ({"kv_type": "q8_0"}, r"KV cache q8_0.*n_embd_head_k=8; use kv_type f16"),
    ],
)
def test_a_context_that_cannot_be_made_is_refused_with_its_size_or_type(
    tiny_model: Path, params: dict[str, Any], message: str
) -> None:
    with Model(tiny_model) as model, pytest.raises(SpeculationError, match=message):
        Context(model, ContextParams(**params))


def test_a_context_is_limited_to_the_learned_positions(tmp_path: Path) -> None:
    path = write_learned_positions_gguf(tmp_path / "gpt2.gguf", n_ctx=100)
    with pytest.raises(InvalidParameter, match="context of 512 tokens .* trained for 100; lower"):
        Engine.load(path, replace(EXACT, n_ctx=512))
    with Engine.load(path, replace(EXACT, n_ctx=0)) as engine:
        assert engine.context.n_ctx == 100
        letters = SamplingParams(grammar="root ::= [a-z]{200}")
        for method in ("ar", "prompt-lookup", "recycling"):
            generation = engine.generate([1, 300], method=method, sampling=letters).run()
            assert (generation.finish_reason, len(generation.token_ids)) == ("context", 99)


def test_an_engine_survives_a_wider_context_that_does_not_fit_in_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(model: Model, params: ContextParams, **more: Any) -> Context:
        if params.n_seq_max > 8:
            raise OutOfMemory("no memory")
        return Context(model, params, **more)

    with Engine.load(tiny_model, replace(EXACT, n_seq_max=8)) as engine:
        before = engine.generate(PROMPT, method="ar", max_tokens=9).run().text
        monkeypatch.setattr(runtime_module, "Context", limited)
        with pytest.raises(OutOfMemory):
            engine.generate(PROMPT, method="recycling:nodes=20", max_tokens=9).run()
        assert engine.generate(PROMPT, method="ar", max_tokens=9).run().text == before


@pytest.mark.parametrize(("n_ctx", "n_batch", "raised"), [(256, 512, "n_ctx"), (512, 256, "n_ba")])
def test_a_window_too_large_for_a_batch_is_refused(
    tiny_model: Path, n_ctx: int, n_batch: int, raised: str
) -> None:
    reason = rf"decodes \d+ rows at a time, but a batch has at most 256 .* or raise {raised}"
    params = ContextParams(n_ctx=n_ctx, n_batch=n_batch)
    with Engine.load(tiny_model, params) as engine, pytest.raises(InvalidParameter, match=reason):
        engine.generate(PROMPT, method="lookahead:window=60,ngram=15", max_tokens=9).run()


def test_methods_that_cannot_run_are_known_before_a_text_needs_them(tiny_model: Path) -> None:
    with Engine.load(tiny_model, replace(EXACT, n_batch=64)) as engine:
        unavailable = engine.unavailable()
        assert isinstance(unavailable["draft"], MissingResource)
        assert "decodes 120 rows at a time" in str(unavailable["lookahead"])
        assert unavailable.keys().isdisjoint(("auto", "ar", "suffix", "jacobi"))


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ('root ::= "yes" | "no', "line 1: unexpected '\"no'"),
        ('root ::= (\n"a"\n"\\q")', "line 3: unexpected '\"\\\\q\")'"),
        ("root ::= nope", "it has no rule 'nope'"),
        ('root ::= ("a"', "1 ( are not closed"),
        ('root ::= "a")', "a ) too many"),
        ('a ::= "b"', "it has no rule 'root'"),
        ('root ::= "a"{5,2}', "in {5,2} the minimum exceeds the maximum"),
        ('root ::= "\\U00110000"', "\\U00110000 is no character"),
        ("root ::= [a-\\UFFFFFFFF]", "\\UFFFFFFFF is no character"),
        ("root ::= [\\uD800-\\uDFFF]", "\\uD800 is no character"),
        ("root ::= " + 501 * "(" + '"a"' + 501 * ")", "nested more than 500 deep"),
        (" # nothing\n", "it has no rule 'root'"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    engine: Engine, gbnf: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError, match=f"does not parse: .*{re.escape(reason)}") as error:
        engine.generate("hi", sampling=SamplingParams(grammar=gbnf), max_tokens=1).run()
    assert "sched" not in str(error.value)
    assert "pars" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{nonsense", "Expecting property name"),
        ("[]", "it is not a JSON object"),
        ("false", "false allows no text at all"),
        ('{"type": "text"}', "type"),
    ],
)
def test_an_invalid_json_schema_is_refused(engine: Engine, schema: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=f"cannot be followed: .*{reason}"):
        engine.generate("a", sampling=SamplingParams(json_schema=schema)).run()


HALF = "half a character"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # Out of range
        ({"temperature": -1}, "temperature is -1; give 0.0 to 100.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"seed": 2**32 - 1}, "seed is 4294967295; give 0 to 4294967294"),
        ({"grammar": "x", "json_schema": "{}"}, "give one"),
        ({"dry_breakers": ("a",) * 17}, "dry_breakers has 17 texts; give at most 16"),
        *(
            ({"logit_bias": {token: 1.0}}, f"has token {token}; this model has 0 to {N_TINY - 1}")
            for token in (-1, N_TINY)
        ),
        *(
            ({"logit_bias": {5: value}}, f"logit_bias of token 5 is {value}")
            for value in (math.nan, math.inf)
        ),
        # Of a wrong type or form
        ({"seed": 1.5}, "seed is 1.5; give an integer"),
        ({"dry_breakers": "ab"}, "dry_breakers is 'ab'; give"),
        ({"dry_breakers": (5,)}, r"dry_breakers is \(5,\); give"),
        ({"dry_breakers": ("\ud800",)}, HALF),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; give an integer or None"),
        ({"temperature": "hot"}, "temperature is 'hot'; give a number"),
        ({"top_k": math.nan}, "top_k is nan; give an integer"),
        ({"seed": None}, "seed is None; give an integer"),
        ({"stop": 3}, "stop is 3; give a text or a list with a text each or None"),
        ({"stop": ["a", None]}, "stop is .*None.; give a text or"),
        ({"stop": ["a", ""]}, "a stop string is empty; leave it out"),
        ({"progress": "x"}, "progress is 'x'; give a function or None"),
        ({"memory": 5}, "memory is 5; give a text or None"),
        ({"record": 1}, "record is 1; give True or False"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is .*; give a mapping from an integer to a numb"),
        ({"logit_bias": [1]}, "logit_bias is .1.; give a mapping"),
        ({"grammar": b"root"}, "grammar is b'root'; give a text or None"),
        ({"grammar": 'root ::= "\udfff"'}, HALF),
        ({"regex": "\ud800"}, HALF),
        ({"json_schema": 3}, "json_schema is 3; give a text or a Mapping or True or False or None"),
        ({"dry_breakers": "\n"}, r"dry_breakers is .*; give a list with a text each"),
        ({"method": "suffix:p_min=0.1,branches=2.5"}, "branches"),
        ({"method": 5}, "method is 5; give a name such as 'suffix', 'FILE.py:SPEC' or a"),
        ({"sampling": 0.5}, r"sampling is 0.5; give SamplingParams\(temperature=0.8\), or"),
        # Under a name that does not exist
        ({"xyzzy": 1}, "there is no setting 'xyzzy'; give some of method, sampling, max_tokens"),
        ({"sampling": {"temp": 0.5}}, "sampling has 'temp'; give some of temperature, seed"),
        ({"method": "auto:sources=suffix+medusa"}, "medusa needs medusa heads; load them with he"),
        ({"method": "./none.py:spec"}, "file not found: .*none.py; give FILE.py:SPEC"),
        ({"method": "lookahead:W=5,N=3"}, "no parameter 'W'; give some of window, ngram, guesses"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(
    engine: Engine, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidParameter, GrammarError), match=message):
        engine.chat("hi", **settings).run()


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ONE_REPLY = "applies to a whole reply and cannot continue one"
ROLES = r"needs a role \(system, user, assistant, developer, tool\)"


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (Engine.generate, [1, 999999], "the prompt has token 999999; this model has 0 to"),
        (Engine.generate, "a\ud800", r"a text has '\\ud800', which is half .* at position 1"),
        (Engine.generate, 5, "the prompt is 5.*; give a text, or token ids"),
        (Engine.generate_batch, "one", r"prompts is 'one'; give a list, such as \[te"),
        (Engine.generate_batch, 3, "prompts is 3; give a list"),
        (Engine.chat, [{"role": "robot", "content": "beep"}], ROLES),
        (Engine.chat, {"role": "user"}, "messages is {'role': 'user'}; give a text, or a list"),
        (Engine.chat, ["Hi"], "invalid message 'Hi'; each needs a role"),
        (Engine.chat, 3, "messages is 3; give a text, or a list of messages"),
        (lambda engine, gbnf: engine.chat(MESSAGES, grammar=gbnf), 'root ::= "a"', ONE_REPLY),
        (lambda engine, schema: engine.chat(MESSAGES, json_schema=schema), "{}", ONE_REPLY),
        (Engine.count_tokens, None, "messages is None; give a text, or a list of messages"),
        (Engine.embed, 3, "texts is 3; give a list"),
        (lambda engine, text: engine.model.tokenize(text), b"a", "text is b'a'; give a text"),
        (lambda engine, token: engine.model.piece(token), -1, "token -1 is not in the vocabulary"),
        (
            lambda engine, token: engine.model.detokenize([5, token]),
            N_TINY,
            f"token {N_TINY} is not in the vocabulary",
        ),
        (lambda engine, method: parse_method(method), 3, "method is 3; give a text"),
        (lambda engine, n: engine.score("a b", n), "3", "logprobs is '3'; give an integer"),
        (lambda engine, n: ContextParams(n_batch=n), None, "n_batch is None; give an integer"),
        (lambda engine, kind: ContextParams(kv_type=kind), 3, "kv_type is 3; give a text"),
    ],
)
def test_an_argument_of_a_wrong_form_is_refused(
    engine: Engine, call: Callable[..., object], given: Any, message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        call(engine, given)


def test_numbers_and_arrays_of_numpy_are_taken(engine: Engine) -> None:
    prompt: Any = np.array([5, 6])
    settings: dict[str, Any] = {"max_tokens": np.int64(3), "temperature": np.float32(0.5)}
    assert len(engine.generate(prompt, **settings).run().token_ids) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace_batches": Path("none/t")}, "cannot write the batch trace .*none/t"),
        ({"memory": Path("none/memory")}, r"cannot write .*memory: no such folder"),
        ({"heads": True}, "heads is True; give files, or 'paired' for those"),
        ({"keep_texts": -1}, "keep_texts is -1; give 0 or more"),
        ({"parallel": 0}, "parallel is 0; give 1 to 255"),
        ({"parallel": 256}, "parallel is 256; give 1 to 255"),
        ({"parallel": "2"}, "parallel is '2'; give an integer"),
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1; give 0 to 999"),
        ({"n_ctx": 2.5}, "n_ctx is 2.5; give an integer or None"),
        ({"memory": 3}, "memory is 3; give a text or a Path or None"),
        ({"heads": [3]}, "heads is .3.; give a text or a Path or a list with a text or a Path"),
        ({"mtp": "yes"}, "mtp is 'yes'; give True or False"),
        ({"progress": 1}, "progress is 1; give a function or None"),
    ],
)
def test_an_engine_is_not_loaded_with_settings_that_cannot_work(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Engine.load("/nowhere/x.gguf" if "memory" in settings else "bundled", **settings)


def test_ctrl_c_is_not_lost_in_a_callback_from_llama_cpp(tiny_model: Path) -> None:
    @ctypes.CFUNCTYPE(None)
    def callback() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert sum(range(1000)) == 499_500  # the signal is handled in here

    before = signal.getsignal(signal.SIGINT)
    continued = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        callback()
        continued = True
    assert continued
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_interrupts_loading(tiny_model: Path) -> None:
    shares: list[float] = []

    def progress(share: float) -> None:
        shares.append(share)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Model(tiny_model, progress=progress)
    assert len(shares) == 1


def interrupt() -> None:
    """Ctrl-C, in the engine's thread, until whoever loads has given up."""
    os.kill(os.getpid(), signal.SIGINT)
    with suppress(GivenUp):
        while True:
            checkpoint()
            time.sleep(0.001)


@pytest.mark.parametrize("when", ["download", "load", "end"])
def test_ctrl_c_ends_a_load_and_leaves_no_model(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def here() -> tuple[set[Model], set[threading.Thread]]:
        threads = {one for one in threading.enumerate() if one.name == "engine"}
        return {one for one in model_module._open if not one.is_closed}, threads

    def found(name: object) -> Path:
        if when == "download":
            interrupt()
            checkpoint()
        return tiny_model

    def made(engine: Engine, driver: Any, runtime: Any, *rest: Any) -> None:
        init(engine, driver, runtime, *rest)
        if when == "end":
            interrupt()

    init, before = Engine.__init__, here()
    monkeypatch.setattr("speculation.runtime.model_file", found)
    monkeypatch.setattr(Engine, "__init__", made)
    with pytest.raises(KeyboardInterrupt):
        Engine.load(
            tiny_model,
            EXACT,
            progress=lambda share: interrupt() if when == "load" else None,
        )
    assert here() == before


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (-2, OutOfMemory, "(?s)not enough memory to compute .* rows .*; lower n_ctx"),
        (-3, ContextError, "llama_decode returned -3"),
    ],
)
def test_a_failed_decode_reports_its_reason(
    code: int, kind: type[Exception], message: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("batching.llama.context._llama_decode", lambda *_: code)
        with pytest.raises(kind, match=message):
            engine.generate(PROMPT, max_tokens=2).run()
    assert engine.generate(PROMPT, max_tokens=2).run().stats.n_tokens == 2


def test_a_memory_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other, file = write_tiny_gguf(tmp_path / "other.gguf", n_layer=1), tmp_path / "memory"
    with Engine.load(other, EXACT, memory=file):
        pass
    with pytest.raises(InvalidParameter, match="memory has the memory of another model; give"):
        Engine.load(tiny_model, EXACT, memory=file)


def test_a_memory_that_cannot_be_saved_is_only_a_warning(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    engine = Engine.load(tiny_model, EXACT, memory=folder / "memory")
    folder.rmdir()
    engine.close()
    assert "cannot save the memory in" in caplog.text
    assert engine.model.is_closed
