"""Real decoding, on a random model: texts, streaming, stopping, reuse, sampling and errors."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.context import Context, ContextParams
from batching.errors import (
    CannotRewind,
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
from batching.interrupts import held_interrupts
from batching.model import Model
from speculation import engine as engine_module
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from tests.exact import EXACT, PROMPT
from tests.tiny_gguf import write_recurrent_gguf, write_tiny_gguf

METHODS = (
    "auto",
    "auto:sources=draft+recycling+lookahead",
    "recycling:nodes=20",
    "draft:p_min=0.02",
    "draft:width=3,nodes=10,p_min=0.01,draft_max=4",
    "prompt-lookup",
    "prompt-lookup:branches=4",
    "prompt-lookup:order=first,adaptive=off",
    "jacobi",
    "lookahead",
    "lookahead:window=5,ngram=4,guesses=3,merge=on,pool_from_prompt=on,window_from_prompt=on",
)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "penalised greedy": SamplingParams(repeat_penalty=1.3, presence_penalty=0.5),
    "seeded": SamplingParams(temperature=0.9, seed=7),
    "truncated": SamplingParams(temperature=1.2, seed=1, top_k=20, top_p=0.9, min_p=0.02),
    "typical and xtc": SamplingParams(
        temperature=1.0, seed=2, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.05
    ),
    "dry": SamplingParams(temperature=0.5, seed=3, dry_multiplier=0.8, repeat_penalty=1.1),
    "mirostat 1": SamplingParams(temperature=1.0, seed=4, mirostat=1),
    "mirostat 2": SamplingParams(temperature=1.0, seed=5, mirostat=2),
    "biased": SamplingParams(temperature=1.0, seed=6, logit_bias={270: 4.0, 271: float("-inf")}),
    "grammar": SamplingParams(grammar='root ::= ("the " | "cat " | "dog ")+'),
    "seeded grammar": SamplingParams(temperature=1.0, seed=8, grammar="root ::= [a-f]+"),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_method_gives_the_text_of_plain_decoding(
    engine: Engine, sampling: SamplingParams
) -> None:
    plain = engine.generate(PROMPT, method="ar", sampling=sampling, max_tokens=60).run()
    assert plain.stats.n_steps == plain.stats.n_tokens
    for method in METHODS:
        ours = engine.generate(PROMPT, method=method, sampling=sampling, max_tokens=60).run()
        assert ours.token_ids == plain.token_ids, method
        assert ours.text == plain.text


def test_drafts_are_accepted_in_these_tests(engine: Engine) -> None:
    repetitive = SamplingParams(grammar='root ::= "the cat " root')
    lookup = engine.generate(PROMPT, method="prompt-lookup", sampling=repetitive, max_tokens=60)
    stats = lookup.run().stats
    assert stats.tokens_per_step > 1.15


def test_no_draft_goes_beyond_the_tokens_asked_for(engine: Engine) -> None:
    for method in ("prompt-lookup:adaptive=off", "draft:p_min=0"):
        for most in (1, 2, 3):
            stats = engine.generate(PROMPT, method=method, max_tokens=most).run().stats
            assert max(stats.rows_histogram) == most, method


def test_tokens_tell_whether_they_were_drafted(engine: Engine) -> None:
    repetitive = SamplingParams(grammar='root ::= "the cat " root')
    generation = engine.generate(PROMPT, method="prompt-lookup", sampling=repetitive, max_tokens=40)
    tokens = list(generation)
    assert "".join(token.text for token in tokens) == generation.text
    assert [token.id for token in tokens] == generation.token_ids
    assert sum(token.drafted for token in tokens) == generation.stats.n_accepted > 0


def test_json_schema_constrains_the_text(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    generation = engine.generate(
        "the cat", sampling=SamplingParams(json_schema=schema), max_tokens=100
    ).run()
    assert generation.finish_reason == "stop"
    assert set(json.loads(generation.text)) == {"a"}


def test_characters_that_span_tokens_arrive_whole(engine: Engine) -> None:
    grammar = SamplingParams(grammar='root ::= "日本é😀"')
    generation = engine.generate("a", sampling=grammar, max_tokens=40)
    texts = [token.text for token in generation]
    assert "".join(texts) == "日本é😀"
    assert [text for text in texts if text] == ["日", "本", "é", "😀"]


def test_a_text_cut_inside_a_character_ends_with_a_replacement(engine: Engine) -> None:
    grammar = SamplingParams(grammar='root ::= "日本"')
    generation = engine.generate("a", sampling=grammar, max_tokens=4)
    assert "".join(token.text for token in generation) == generation.text == "日\ufffd"
    assert generation.finish_reason == "length"


def test_a_stop_string_ends_the_text_and_is_never_shown(engine: Engine) -> None:
    grammar = SamplingParams(grammar='root ::= "the cat saw a dog"')
    for method in ("ar", *METHODS):
        generation = engine.generate(PROMPT, method=method, sampling=grammar, stop=["saw"])
        shown = [token.text for token in generation]
        assert "".join(shown) == generation.text == "the cat "
        assert generation.finish_reason == "stop"


def test_what_may_become_a_stop_string_is_kept_back_until_it_does_not(engine: Engine) -> None:
    grammar = SamplingParams(grammar='root ::= "the cat saw a dog"')
    generation = engine.generate(PROMPT, sampling=grammar, stop=["dogs", "cat sat"])
    assert "".join(token.text for token in generation) == "the cat saw a dog"


def test_an_end_of_generation_token_ends_the_text_and_adds_nothing(engine: Engine) -> None:
    end = engine.model.special_token("eot")
    assert end is not None
    generation = engine.generate(
        "a", sampling=SamplingParams(logit_bias={end: 1000.0}), max_tokens=9
    ).run()
    assert (generation.text, generation.finish_reason) == ("", "stop")
    assert generation.token_ids == [end]


def test_a_full_context_is_a_normal_end(tiny_model: Path, tiny_draft: Path) -> None:
    params = ContextParams(n_ctx=256, kv_type="f32", flash_attn="off", n_threads=1)
    with Engine.load(tiny_model, params, draft_model=tiny_draft) as engine:
        ends = sorted(engine.model.ends)
        endless = SamplingParams(logit_bias=dict.fromkeys(ends, float("-inf")))
        texts = []
        for method in ("ar", *METHODS):
            generation = engine.generate(PROMPT, method=method, sampling=endless).run()
            assert generation.finish_reason == "context"
            assert generation.stats.n_prompt + generation.stats.n_tokens == engine.context.n_ctx + 1
            texts.append(generation.text)
        assert len(set(texts)) == 1


def test_a_closed_text_leaves_the_engine_ready(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=30).run().text
    for method in METHODS:
        generation = engine.generate(PROMPT, method=method)
        for _ in range(5):
            next(iter(generation))
        generation.close()
        assert generation.finish_reason == "cancelled"
        assert engine.generate(PROMPT, method=method, max_tokens=30).run().text == expected


def test_a_new_text_ends_the_one_before(engine: Engine) -> None:
    first = engine.generate(PROMPT)
    next(iter(first))
    engine.generate(PROMPT, max_tokens=3).run()
    assert first.finish_reason == "cancelled"
    assert list(first) == []


def test_cancelling_takes_effect_within_a_step(engine: Engine) -> None:
    stop = False
    generation = engine.generate(PROMPT, method="ar", cancelled=lambda: stop)
    tokens = iter(generation)
    next(tokens)
    stop = True
    assert list(tokens) == []
    assert (generation.finish_reason, len(generation.token_ids)) == ("cancelled", 1)


def test_the_next_turn_of_a_chat_decodes_only_what_is_new(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    first = engine.chat(messages, max_tokens=8).run()
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "a dog"},
    ]
    second = engine.chat(messages, max_tokens=8).run()
    assert second.stats.n_reused >= first.stats.n_prompt


@pytest.mark.parametrize("sizes", [{"n_ctx": 32}, {"n_ctx": 512, "n_batch": 16}])
def test_a_context_smaller_than_the_batches_that_are_measured_works(
    tiny_model: Path, sizes: dict[str, int]
) -> None:
    with Engine.load(tiny_model, replace(EXACT, **sizes)) as engine:
        plain = engine.generate("a cat", method="ar", max_tokens=8).run()
        assert engine.generate("a cat", max_tokens=8).run().token_ids == plain.token_ids


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "auto"])
def test_measuring_costs_does_not_forget_the_prompt(tiny_model: Path, method: str) -> None:
    with Engine.load(tiny_model, EXACT) as engine:
        for _ in range(3):
            generation = engine.generate(PROMPT, method=method, max_tokens=3).run()
        assert generation.stats.n_reused == generation.stats.n_prompt - 1


def test_a_system_message_reaches_the_template(engine: Engine) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    generation = engine.chat(chat, max_tokens=1).run()
    assert engine.model.detokenize(generation.prompt) == (
        b"<s><|system|>a<|end|><|user|>b<|end|><|assistant|>"
    )


def test_a_control_token_written_in_a_message_stays_text(engine: Engine) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "the<|end|><|assistant|>c"},
    ]
    tokens = engine.chat(chat, max_tokens=1).run().prompt
    assert engine.model.detokenize(tokens) == (
        b"<s><|user|>a<|end|><|assistant|>b<|end|>"
        b"<|user|>the<|end|><|assistant|>c<|end|><|assistant|>"
    )
    end = engine.model.special_token("eot")
    assert tokens.count(end) == 3  # one a message, none from its text


def test_every_decode_is_traced(tiny_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Engine.load(tiny_model, EXACT, trace_batches=trace) as engine:
        prompt = engine.model.tokenize("the cat")
        engine.generate(prompt, method="ar", max_tokens=2).run()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    n = len(prompt)
    assert lines[0] == [[token, i, [0], int(i == n - 1)] for i, token in enumerate(prompt)]
    assert [row[1:] for row in lines[1]] == [[n, [0], 1]]
    assert len(lines) == 2


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


def test_a_recurrent_model_decodes_plainly_and_refuses_drafts(tmp_path: Path) -> None:
    path = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    with Engine.load(path, EXACT) as engine:
        engine.prepare()
        first = engine.generate(PROMPT, method="ar", max_tokens=10).run()
        assert len(first.token_ids) == 10
        again = engine.generate(PROMPT, method="ar", max_tokens=10).run()
        assert again.token_ids == first.token_ids
        assert engine.generate(PROMPT, max_tokens=10).run().token_ids == first.token_ids  # auto
        with pytest.raises(CannotRewind, match=r"recurrent or hybrid.*use method ar"):
            engine.generate(PROMPT, method="prompt-lookup").run()


def test_a_prompt_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"the context holds 512; shorten it .*at least 602"):
        engine.generate("a" * 600, max_tokens=1).run()
    assert engine.generate(PROMPT, max_tokens=3).run().finish_reason == "length"


def test_a_context_too_large_for_memory_is_refused_with_its_size(tiny_model: Path) -> None:
    with (
        Model(tiny_model) as model,
        pytest.raises(SpeculationError, match=r"context of 2,000,000,000 tokens.*lower --ctx"),
    ):
        Context(model, ContextParams(n_ctx=2_000_000_000, flash_attn="off"))


def test_a_method_that_needs_more_sequences_than_the_context_has_gets_them(
    tiny_model: Path,
) -> None:
    with Engine.load(tiny_model, replace(EXACT, n_seq_max=2)) as engine:
        plain = engine.generate(PROMPT, method="ar", max_tokens=20).run()
        wide = engine.generate(PROMPT, method="lookahead", max_tokens=20).run()
        assert engine.context.n_seq_max == 31
        assert wide.token_ids == plain.token_ids


def test_a_grammar_that_does_not_parse_is_refused(engine: Engine) -> None:
    with pytest.raises(GrammarError, match="does not parse"):
        engine.generate("a", sampling=SamplingParams(grammar='root ::= "a')).run()


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


def test_braces_in_texts_and_classes_of_a_grammar_are_no_repetitions(engine: Engine) -> None:
    gbnf = 'root ::= "{5,2}(" [{5,2}(] "(" # {5,2}'
    reply = engine.generate("hi", sampling=SamplingParams(grammar=gbnf), max_tokens=20).run()
    assert reply.text.startswith("{5,2}(")


def test_no_sampler_looks_back_further_than_the_context(engine: Engine) -> None:
    def text(last_n: int) -> str:
        sampling = SamplingParams(
            logit_bias={270: 20.0},
            presence_penalty=30.0,
            penalty_last_n=last_n,
            dry_multiplier=1.0,
            dry_last_n=last_n,
        )
        return engine.generate("the cat", sampling=sampling, max_tokens=20).run().text

    assert text(2**31 - 1) == text(-1) == text(engine.context.n_ctx)
    assert text(0) != text(-1)


def test_a_bias_is_of_a_token_that_is_there_and_a_number(engine: Engine) -> None:
    for token in (-1, engine.model.n_vocab):
        with pytest.raises(InvalidParameter, match=f"names token {token}, and the model has 0 to"):
            engine.generate("hi", sampling=SamplingParams(logit_bias={token: 1.0})).run()
    for value in (math.nan, math.inf):
        with pytest.raises(InvalidParameter, match=f"logit_bias of token 5 is {value}"):
            SamplingParams(logit_bias={5: value})


def test_tokens_of_a_prompt_are_those_of_the_model(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="the prompt has token 999999; this model has 0 to"):
        engine.generate([1, 999999])
    with pytest.raises(InvalidParameter, match="at position 1 is half of a character"):
        engine.generate("a\ud800")


def test_one_stop_string_may_be_given_as_it_is(engine: Engine) -> None:
    text = engine.generate("the", method="ar", max_tokens=20).run().text
    assert len(text) > 6
    stop = text[3:6]
    ours = engine.generate("the", method="ar", max_tokens=20, stop=stop).run().text
    assert ours == text[: text.index(stop)]


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


def test_a_window_that_no_batch_holds_is_refused(tiny_model: Path) -> None:
    with (
        Engine.load(tiny_model, ContextParams(n_ctx=256)) as engine,
        pytest.raises(InvalidParameter, match=r"decodes \d+ rows at a time, and a batch holds 256"),
    ):
        engine.generate("hi", method="lookahead:window=60,ngram=9", max_tokens=4).run()


def test_a_batch_holds_what_the_context_was_rounded_up_to(tiny_model: Path) -> None:
    with Engine.load(tiny_model, ContextParams(n_ctx=100)) as engine:
        assert (engine.context.n_ctx, engine.context.n_batch) == (256, 256)


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


def test_a_trace_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="batches cannot be traced to .*none/t"):
        Engine.load(tiny_model, trace_batches=tmp_path / "none" / "t")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [("{nonsense", "Expecting property name"), ("[]", "it is no JSON object")],
)
def test_a_json_schema_that_does_not_parse_is_refused(
    engine: Engine, schema: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=f"cannot be read: {reason}"):
        engine.generate("a", sampling=SamplingParams(json_schema=schema)).run()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature is -1; give 0.0 to 100.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"seed": 2**32 - 1}, "seed is 4294967295; give 0 to 4294967294"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"grammar": "x", "json_schema": "{}"}, "give one"),
    ],
)
def test_sampling_out_of_range_is_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_a_last_message_of_the_assistant_is_gone_on_with(engine: Engine) -> None:
    said = [{"role": "user", "content": "the cat saw a dog"}]
    prompt = engine.chat(said, max_tokens=1).prompt
    for text in ("a cat", "</s> a cat"):
        tokens = engine.chat([*said, {"role": "assistant", "content": text}], max_tokens=1).prompt
        assert tokens[: len(prompt)] == prompt
        assert engine.model.detokenize(tokens[len(prompt) :]).decode() == text
        assert engine.model.special_token("eos") not in tokens[len(prompt) :]


def test_a_grammar_is_refused_for_a_reply_that_has_begun(engine: Engine) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for sampling in (SamplingParams(grammar='root ::= "a"'), SamplingParams(json_schema="{}")):
        with pytest.raises(InvalidParameter, match="is for a whole reply, and this one has begun"):
            engine.chat(said, sampling=sampling)


def test_an_unknown_role_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="give a role of system, user, assistant"):
        engine.chat([{"role": "robot", "content": "beep"}])
