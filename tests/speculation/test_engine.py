"""Real decoding, on a random model: texts, streaming, stopping, reuse and sampling."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from speculation.drafter import MethodSpec
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.reply import Reply
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT, PROMPT, endless, same_texts
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf


def test_no_draft_goes_beyond_max_tokens(engine: Engine) -> None:
    for most in (1, 2, 3):
        text = engine.generate(PROMPT, method="draft:p_min=0,p_path=0", max_tokens=most)
        assert max(text.run().stats.rows_histogram) == most


def test_tokens_tell_whether_they_were_drafted(engine: Engine) -> None:
    repetitive = SamplingParams(grammar='root ::= ("the cat ")+')
    text = engine.generate(PROMPT, method="prompt-lookup", sampling=repetitive, max_tokens=60)
    tokens = list(text)
    assert "".join(token.text for token in tokens) == text.text
    assert [token.id for token in tokens] == text.token_ids
    assert sum(token.drafted for token in tokens) == text.stats.n_accepted
    assert text.stats.tokens_per_step > 1.15


def test_json_schema_constrains_the_text(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    generation = engine.generate(
        "the cat", sampling=SamplingParams(json_schema=schema), max_tokens=100
    ).run()
    assert generation.finish_reason == "stop"
    assert set(json.loads(generation.text)) == {"a"}


def test_characters_that_span_tokens_arrive_complete_or_are_replaced_at_the_end(
    engine: Engine,
) -> None:
    grammar = SamplingParams(grammar='root ::= "日本é😀"')
    text = engine.generate("a", sampling=grammar, max_tokens=40)
    assert [token.text for token in text if token.text] == ["日", "本", "é", "😀"]
    assert text.text == "日本é😀"
    text = engine.generate("a", sampling=grammar, max_tokens=4)
    tokens = list(text)
    assert "".join(token.text for token in tokens) == text.text == "日\ufffd"
    assert [token.id for token in tokens] == text.token_ids and len(tokens) == 4
    assert text.finish_reason == "length"


def test_a_stop_string_ends_the_text_and_is_never_shown(engine: Engine) -> None:
    grammar = SamplingParams(grammar='root ::= "the cat saw a dog"')
    text = engine.generate(PROMPT, method="prompt-lookup", sampling=grammar, stop="saw")
    assert "".join(token.text for token in text) == text.text == "the cat "
    assert text.finish_reason == "stop"
    # Text that may become a stop string is held back until it cannot.
    text = engine.generate(PROMPT, sampling=grammar, stop=["dogs", "cat sat"])
    assert "".join(token.text for token in text) == "the cat saw a dog"


def test_an_end_of_generation_token_ends_the_text_and_adds_no_characters(engine: Engine) -> None:
    end = engine.model.special_token("eot")
    assert end is not None
    biased = SamplingParams(logit_bias={end: 1000.0})
    text = engine.generate("a", sampling=biased, max_tokens=9).run()
    assert (text.text, text.finish_reason, text.token_ids) == ("", "stop", [end])


def test_a_closed_text_leaves_the_engine_ready(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=30).run().text

    def begun(method: str) -> Reply:  # in the engine's thread, which writes no more meanwhile
        text = engine.generate(PROMPT, method=method, sampling=endless(engine))
        for _ in range(2):
            engine._scheduler.step()
        text.cancel()
        return text

    for method in ("auto", "draft:p_min=0.02", "suffix", "recycling", "lookahead"):
        text = engine.call(partial(begun, method)).run()
        assert text.finish_reason in ("cancelled", "context") and text.token_ids  # if it was fast
        assert engine.generate(PROMPT, method=method, max_tokens=30).run().text == expected


def test_leaving_a_loop_cancels_the_text_and_taking_a_token_does_not(engine: Engine) -> None:
    text = engine.generate(PROMPT, method="ar", sampling=endless(engine))
    first = next(text)
    for _ in text:
        break
    assert text.run().finish_reason == "cancelled" or not text.is_cancelled  # it was full before
    assert text.token_ids[0] == first.id
    whole = engine.generate(PROMPT, method="ar", max_tokens=9)
    begun = [next(whole), next(whole)]
    assert [token.id for token in [*begun, *whole]][:9] == whole.token_ids
    assert whole.finish_reason == "length"


def test_the_next_turn_of_a_chat_decodes_only_new_tokens(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the cat saw"}]
    assert engine.count_tokens(messages) == engine.count_tokens("the cat saw") == 14
    first = engine.chat(messages, max_tokens=8).run()
    assert first.stats.n_prompt == 14
    messages.append({"role": "assistant", "content": first.text})
    second = engine.chat([*messages, {"role": "user", "content": "a dog"}], max_tokens=8).run()
    assert second.stats.n_reused >= first.stats.n_prompt


@pytest.mark.parametrize("sizes", [{"n_ctx": 32}, {"n_ctx": 512, "n_batch": 16}])
def test_a_context_smaller_than_the_measured_batches_works(
    tiny_model: Path, sizes: dict[str, Any]
) -> None:
    with Engine.load(tiny_model, replace(EXACT, **sizes)) as engine:
        same_texts(engine, "a cat", "auto", max_tokens=8)


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "auto"])
def test_measuring_costs_keeps_the_cached_prompt(tiny_model: Path, method: str) -> None:
    with Engine.load(tiny_model, EXACT) as engine:
        for _ in range(3):
            generation = engine.generate(PROMPT, method=method, max_tokens=3).run()
        assert generation.stats.n_reused == generation.stats.n_prompt - 1


@pytest.mark.parametrize(
    ("contents", "rendered"),
    [
        ({"system": "a", "user": "b"}, "<s><|system|>a<|end|><|user|>b<|end|><|assistant|>"),
        # A control token in a message is treated as text.
        (
            {"system": "a", "user": "the<|end|><|assistant|>c"},
            "<s><|system|>a<|end|><|user|>the<|end|><|assistant|>c<|end|><|assistant|>",
        ),
    ],
)
def test_messages_reach_the_template_and_control_tokens_in_them_are_text(
    engine: Engine, contents: dict[str, str], rendered: str
) -> None:
    chat = [{"role": role, "content": content} for role, content in contents.items()]
    tokens = engine.chat(chat, max_tokens=1).run().prompt
    assert engine.model.detokenize(tokens).decode() == rendered
    end = engine.model.special_token("eot")
    assert end is not None
    assert tokens.count(end) == 2  # one per message, none from its text


def test_every_decode_is_traced(tiny_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Engine.load(tiny_model, EXACT, trace_batches=trace) as engine:
        prompt = engine.model.tokenize("the cat")
        engine.generate(prompt, method="ar", max_tokens=2).run()
    assert sys.platform == "win32" or trace.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    n = len(prompt)
    assert lines[0] == [[token, i, [0], int(i == n - 1)] for i, token in enumerate(prompt)]
    assert [row[1:] for row in lines[1]] == [[n, [0], 1]]
    assert len(lines) == 2


def test_the_context_grows_for_a_method_that_needs_more_sequences(tiny_model: Path) -> None:
    with Engine.load(tiny_model, replace(EXACT, n_seq_max=2)) as engine:
        same_texts(engine, PROMPT, "lookahead", max_tokens=20)
        assert engine.context.n_seq_max == 31


def test_braces_in_literals_and_classes_of_a_grammar_are_not_repetitions(engine: Engine) -> None:
    gbnf = 'root ::= "{5,2}(" [{5,2}(] "(" # {5,2}'
    reply = engine.generate("hi", sampling=SamplingParams(grammar=gbnf), max_tokens=20).run()
    assert reply.text.startswith("{5,2}(")


def test_penalties_look_back_at_most_over_the_context(engine: Engine) -> None:
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


def test_n_batch_covers_the_rounded_up_context(tiny_model: Path) -> None:
    with Engine.load(tiny_model, ContextParams(n_ctx=100)) as engine:
        assert (engine.context.n_ctx, engine.context.n_batch) == (256, 256)


def test_a_last_message_from_the_assistant_is_continued(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the cat saw a dog"}]
    prompt = engine.chat(messages, max_tokens=1).prompt
    for text in ("a cat", "</s> a cat"):
        tokens = engine.chat(
            [*messages, {"role": "assistant", "content": text}], max_tokens=1
        ).prompt
        assert tokens[: len(prompt)] == prompt
        assert engine.model.detokenize(tokens[len(prompt) :]).decode() == text
        assert engine.model.special_token("eos") not in tokens[len(prompt) :]


def test_what_was_written_is_drafted_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory"
    texts = []
    for method in ("suffix", "suffix", "suffix:memory=off"):
        with Engine.load(tiny_model, EXACT, memory=file) as engine:
            texts.append(engine.generate("a dog", method=method, max_tokens=60).run())
    cold, warm, off = texts
    assert cold.token_ids == warm.token_ids == off.token_ids
    assert warm.stats.n_steps < 10 < cold.stats.n_steps == off.stats.n_steps


def test_only_texts_of_methods_that_use_it_are_in_the_memory(tiny_model: Path) -> None:
    with Engine.load(tiny_model, EXACT) as engine:
        for method in ("ar", "prompt-lookup", "suffix:memory=off"):
            engine.generate(PROMPT, method=method, max_tokens=5).run()
        assert len(engine.resources.memory.index.tokens) == 0
        abandoned = engine.generate(PROMPT, method="suffix", sampling=endless(engine))
        next(abandoned)
        abandoned.cancel()
        abandoned.run()
        tokens = engine.resources.memory.index.tokens.tolist()
        assert tokens == [*abandoned.prompt, *abandoned.token_ids, -1]


def test_a_prediction_is_drafted_and_changes_nothing(engine: Engine) -> None:
    settings: dict[str, Any] = {"method": "prediction", "max_tokens": 40}
    plain = engine.generate(PROMPT, method="ar", max_tokens=40).run()
    for prediction, accepted in ((plain.text, 0), (plain.token_ids, 30), ((), -1)):
        found = engine.generate(PROMPT, prediction=prediction, **settings).run()
        assert found.token_ids == plain.token_ids
        assert found.stats.n_accepted > accepted
    assert found.stats.n_drafted == 0  # without a prediction
    with pytest.raises(InvalidParameter, match="the prediction has token -1; this model has 0 to"):
        engine.generate(PROMPT, prediction=[-1, 5])


def test_settings_may_be_written_in_several_ways(engine: Engine) -> None:
    seeded = SamplingParams(temperature=0.9, seed=7)
    expected = engine.chat("the cat", sampling=seeded, max_tokens=20).run().token_ids
    own = MethodSpec(name="own", title="Own", make=lambda params, resources: None)
    for settings in (
        {"temperature": 0.9, "seed": 7},
        {"sampling": {"temperature": 0.9, "seed": 7}},
        {"sampling": SamplingParams(temperature=0.9), "seed": 7},
        {"sampling": seeded, "method": own},
        {"sampling": seeded, "method": parse_method("suffix")},
        {"sampling": seeded, "method": f"{ROOT / 'examples' / 'bigrams.py'}:spec"},
    ):
        found = engine.chat("the cat", max_tokens=20, **settings).run()
        assert found.token_ids == expected, settings


def test_several_prompts_are_continued_in_their_order(engine: Engine) -> None:
    prompts = ["the cat", "a dog"]
    found = engine.generate_batch(prompts, method="ar", max_tokens=9)
    assert [text.prompt for text in found] == [engine.model.tokenize(text) for text in prompts]
    assert {len(text.token_ids) for text in found} == {9}


def test_a_reply_of_a_model_without_a_chat_template_ends_before_the_next_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf(tmp_path / "base.gguf", chat_template=None)
    turns = SamplingParams(grammar='root ::= " a cat\\n" ("user" | "system") ": why?"')
    with Engine.load(path, EXACT) as engine:
        reply = engine.chat("a dog", sampling=turns, max_tokens=60).run()
    assert (reply.text, reply.finish_reason) == (" a cat", "stop")
    assert "has no chat template" in caplog.text
