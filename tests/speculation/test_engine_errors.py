"""What is refused, with its reason, and that the engine outlives it; Ctrl-C."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.errors import (
    ContextError,
    DecodeFailed,
    EngineInUse,
    GrammarError,
    InvalidParameter,
    ModelError,
    ModelFileMissing,
    NotGGUF,
    OutOfMemory,
    PromptTooLong,
    SpeculationError,
    TruncatedGGUF,
    UnsupportedModel,
)
from batching.llama.context import Context, ContextParams
from batching.llama.interrupts import held_interrupts
from batching.llama.model import Model
from speculation import engine as engine_module
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT, PROMPT
from tests.support.tiny_gguf import write_learned_positions_gguf, write_tiny_gguf


def test_there_is_no_such_file() -> None:
    with pytest.raises(ModelFileMissing, match=r"no file /nowhere/x\.gguf; check the path"):
        Model("/nowhere/x.gguf")


def test_a_file_that_is_no_gguf_is_named_with_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(NotGGUF, match=r"starts with b'PK\\x03\\x04', not b'GGUF'"):
        Model(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_gguf_is_told_to_be_downloaded_again(
    tiny_model: Path, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "half.gguf"
    data = tiny_model.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(TruncatedGGUF, match="incomplete.*download it again"):
        Model(path)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="perceptron")
    with pytest.raises(UnsupportedModel, match="perceptron.*newer llama-cpp-python"):
        Model(path)


def test_a_prompt_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"the context holds 512; shorten it.* at least 602"):
        engine.generate("a" * 600, max_tokens=1).run()
    assert engine.generate(PROMPT, max_tokens=3).run().finish_reason == "length"


def test_tokens_of_a_prompt_are_those_of_the_model(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="the prompt has token 999999; this model has 0 to"):
        engine.generate([1, 999999])
    with pytest.raises(InvalidParameter, match="at position 1 is half of a character"):
        engine.generate("a\ud800")


def test_an_unknown_role_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match=r"needs a role \(system, user, assistant\)"):
        engine.chat([{"role": "robot", "content": "beep"}])


@pytest.mark.parametrize("given", [{"role": "user", "content": "Hi"}, ["Hi"]])
def test_what_is_no_list_of_messages_is_refused(engine: Engine, given: Any) -> None:
    with pytest.raises(InvalidParameter, match="invalid message '(role|Hi)'; each needs a role"):
        engine.chat(given)


def test_a_context_too_large_for_memory_is_refused_with_its_size(tiny_model: Path) -> None:
    with (
        Model(tiny_model) as model,
        pytest.raises(SpeculationError, match=r"context of 2,000,000,000 tokens.*lower n_ctx"),
    ):
        Context(model, ContextParams(n_ctx=2_000_000_000, flash_attn="off"))


def test_a_context_ends_where_learned_positions_do(tmp_path: Path) -> None:
    path = write_learned_positions_gguf(tmp_path / "gpt2.gguf", n_ctx=100)
    with pytest.raises(ContextError, match="has learned 100 positions, and a context of 512"):
        Engine.load(path, replace(EXACT, n_ctx=512))
    with Engine.load(path, replace(EXACT, n_ctx=0)) as engine:
        assert engine.context.n_ctx == 100
        letters = SamplingParams(grammar="root ::= [a-z]{200}")
        for method in ("ar", "prompt-lookup", "recycling"):
            generation = engine.generate([1, 300], method=method, sampling=letters).run()
            assert (generation.finish_reason, len(generation.token_ids)) == ("context", 99)


def test_a_cache_that_cannot_be_quantised_is_to_be_f16(tiny_model: Path) -> None:
    with (
        Model(tiny_model) as model,
        pytest.raises(ContextError, match=r"KV cache q8_0.*n_embd_head_k=8; use kv_type f16"),
    ):
        Context(model, ContextParams(kv_type="q8_0"))


def test_an_engine_outlives_a_wider_context_that_there_is_no_memory_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(model: Model, params: ContextParams, **more: Any) -> Context:
        if params.n_seq_max > 8:
            raise OutOfMemory("no memory")
        return Context(model, params, **more)

    with Engine.load(tiny_model, replace(EXACT, n_seq_max=8)) as engine:
        before = engine.generate(PROMPT, method="ar", max_tokens=9).run().text
        monkeypatch.setattr(engine_module, "Context", limited)
        with pytest.raises(OutOfMemory):
            engine.generate(PROMPT, method="prompt-lookup:branches=20", max_tokens=9).run()
        assert engine.generate(PROMPT, method="ar", max_tokens=9).run().text == before


@pytest.mark.parametrize(
    ("n_ctx", "way_out"),
    [(256, "has at most 256 .* or raise n_ctx"), (1024, "has at most 512 .* or raise n_ba")],
)
def test_a_window_that_no_batch_holds_is_refused(
    tiny_model: Path, n_ctx: int, way_out: str
) -> None:
    with (
        Engine.load(tiny_model, ContextParams(n_ctx=n_ctx)) as engine,
        pytest.raises(
            InvalidParameter, match=rf"decodes \d+ rows at a time, but a batch {way_out}"
        ),
    ):
        engine.generate(PROMPT, method="lookahead:window=60,ngram=15", max_tokens=9).run()


def test_a_source_that_auto_is_told_to_use_has_to_be_there(engine: Engine) -> None:
    with pytest.raises(
        InvalidParameter, match="method medusa needs medusa heads; load them with heads"
    ):
        engine.generate(PROMPT, method="auto:sources=prompt-lookup+medusa", max_tokens=9).run()


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ('root ::= "yes" | "no', "unexpected end of input"),
        ("root ::= nope", "Undefined rule identifier 'nope'"),
        ('root ::= root "a"', "left recursion detected"),
        ('a ::= "b"', "does not contain a 'root' symbol"),
        ('root ::= "a"{5,2}', "{5,2} asks for more repetitions at least than at most"),
        ("root ::= " + 501 * "(" + '"a"' + 501 * ")", "more than 500 brackets"),
        (" # nothing\n", "it is empty"),
    ],
)
def test_a_grammar_is_refused_with_its_own_reason(
    engine: Engine, gbnf: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError, match=f"does not parse: .*{re.escape(reason)}") as error:
        engine.generate("hi", sampling=SamplingParams(grammar=gbnf), max_tokens=1).run()
    assert "sched" not in str(error.value)
    assert "pars" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("schema", "reason"),
    [("{nonsense", "Expecting property name"), ("[]", "it is no JSON object")],
)
def test_a_json_schema_that_does_not_parse_is_refused(
    engine: Engine, schema: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=f"cannot be read: {reason}"):
        engine.generate("a", sampling=SamplingParams(json_schema=schema)).run()


def test_a_grammar_is_refused_for_a_reply_that_has_begun(engine: Engine) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for sampling in (SamplingParams(grammar='root ::= "a"'), SamplingParams(json_schema="{}")):
        with pytest.raises(
            InvalidParameter, match="applies to a whole reply and cannot continue one"
        ):
            engine.chat(said, sampling=sampling)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature is -1; give 0.0 to 100.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"seed": 2**32 - 1}, "seed is 4294967295; give 0 to 4294967294"),
        ({"seed": 1.5}, "seed is 1.5; give an integer"),
        ({"grammar": "x", "json_schema": "{}"}, "give one"),
    ],
)
def test_sampling_out_of_range_is_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_a_bias_is_of_a_token_that_is_there_and_a_number(engine: Engine) -> None:
    for token in (-1, engine.model.n_vocab):
        with pytest.raises(InvalidParameter, match=f"has token {token}; this model has 0 to"):
            engine.generate("hi", sampling=SamplingParams(logit_bias={token: 1.0})).run()
    for value in (math.nan, math.inf):
        with pytest.raises(InvalidParameter, match=f"logit_bias of token 5 is {value}"):
            SamplingParams(logit_bias={5: value})


def test_a_trace_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="batches cannot be traced to .*none/t"):
        Engine.load(tiny_model, trace_batches=tmp_path / "none" / "t")


def test_an_engine_that_is_closed_says_so(tiny_model: Path) -> None:
    engine = Engine.load(tiny_model)
    engine.prepare()  # what was measured is kept at the first close
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate("hi"),
        lambda: engine.generate([1, 2]),
        lambda: engine.chat("hi"),
        engine.prepare,
    ):
        with pytest.raises(ModelError, match="is closed; load it again"):
            use()


def test_a_text_that_another_thread_writes_cannot_be_ended_from_outside(tiny_model: Path) -> None:
    with Engine.load(tiny_model) as engine:
        inside, go_on = threading.Event(), threading.Event()

        def cancelled() -> bool:
            inside.set()
            return go_on.wait()

        generation = engine.generate("hi", max_tokens=50, cancelled=cancelled)
        thread = threading.Thread(target=generation.run)
        thread.start()
        inside.wait()
        with pytest.raises(EngineInUse, match="another thread is generating"):
            engine.generate("ho")
        go_on.set()
        thread.join()
        assert generation.finish_reason == "cancelled"


def test_ctrl_c_is_not_lost_in_what_llama_cpp_calls(tiny_model: Path) -> None:
    @ctypes.CFUNCTYPE(None)
    def callback() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert sum(range(1000)) == 499_500  # the signal is handled in here

    before = signal.getsignal(signal.SIGINT)
    gone_on = False
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        callback()
        gone_on = True
    assert gone_on
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_load(tiny_model: Path) -> None:
    shares: list[float] = []

    def progress(share: float) -> None:
        shares.append(share)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Model(tiny_model, progress=progress)
    assert len(shares) == 1


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (-2, OutOfMemory, "(?s)no memory left to compute .* rows .*; lower n_ctx"),
        (-3, DecodeFailed, "llama_decode returned -3"),
    ],
)
def test_a_decode_that_there_is_no_memory_for_says_so(
    code: int,
    kind: type[Exception],
    says: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("batching.llama.context._llama_decode", lambda *_: code)
        with pytest.raises(kind, match=says):
            engine.generate(PROMPT, max_tokens=2).run()
    assert engine.generate(PROMPT, max_tokens=2).run().stats.n_tokens == 2


@pytest.mark.parametrize("past_the_end", [False, True])
def test_a_number_that_is_no_token_has_no_piece(engine: Engine, past_the_end: bool) -> None:
    token = engine.model.n_vocab if past_the_end else -1
    for use in (engine.model.piece, lambda wrong: engine.model.detokenize([5, wrong])):
        with pytest.raises(InvalidParameter, match=f"token {token} is not of this model"):
            use(token)
