"""Models with a recurrent state: rewinding them, and that drafts do not change their texts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batching.cache import TAIL
from batching.errors import CannotRewind, InvalidParameter
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import Rows, pack, rows_back
from speculation.engine import Engine
from tests.support.exact import endless, random_requests, same_texts
from tests.support.tiny_gguf import write_hybrid_gguf, write_recurrent_gguf, write_tiny_gguf

EXACT = ContextParams(n_ctx=512, kv_type="f32", flash_attn="off")
METHODS = ("auto", "suffix:branches=3,p_min=0.1", "jacobi", "recycling:nodes=12")
PROMPT = "the cat saw a dog and the cat saw a dog and the cat"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_gguf(tmp_path_factory.mktemp("models") / "hybrid.gguf")


@pytest.fixture(scope="module")
def engine(hybrid: Path) -> Iterator[Engine]:
    with Engine.load(hybrid, EXACT) as made:
        yield made


@pytest.fixture
def context(hybrid: Path) -> Iterator[Context]:
    with Model(hybrid) as model, Context(model, EXACT) as made:
        yield made


def chain(tokens: list[int], position: int, seq_id: int = 0) -> Rows:
    n, ids = len(tokens), range(seq_id, seq_id + 1)
    return Rows(tokens, range(position, position + n), [ids] * n, [True] * n)


def test_rewinding_the_last_rows_restores_the_earlier_state(context: Context) -> None:
    assert (context.n_rewind, context.n_seq_max) == (8, 1)
    context.decode(chain([5, 6, 7, 8], 0))
    expected = context.decode(chain([9], 4)).logits(0).copy()
    context.seq_rm(-1, 0, -1)
    context.decode(chain([5, 6, 7, 8, 10, 11, 12], 0))
    context.seq_rm(-1, 4, -1)
    found = context.decode(chain([9], 4)).logits(0)
    assert abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(("n_ubatch", "n_rewind"), [(1, 0), (2, 0), (3, 1), (9, 7), (10, 8)])
def test_fewer_states_are_kept_than_rows_computed_at_a_time(
    hybrid: Path, n_ubatch: int, n_rewind: int
) -> None:
    with Model(hybrid) as model, Context(model, replace(EXACT, n_ubatch=n_ubatch)) as context:
        assert context.n_rewind == n_rewind
        context.decode(chain([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 0))


def test_a_decode_can_be_rewound_only_once_and_only_as_far_as_copies_exist(
    context: Context,
) -> None:
    context.decode(chain(list(range(5, 25)), 0))
    with pytest.raises(CannotRewind, match="cannot roll back 9 tokens"):
        context.seq_rm(-1, 11, -1)
    context.seq_rm(-1, 12, -1)
    with pytest.raises(CannotRewind):  # only once
        context.seq_rm(-1, 11, -1)
    context.decode(chain([9], 12))
    with pytest.raises(CannotRewind):  # the copies belong to the previous decode
        context.seq_rm(-1, 12, -1)
    context.seq_rm(-1, 13, -1)  # drops nothing
    context.seq_rm(-1, 0, -1)  # drops everything


def test_each_sequence_goes_back_by_itself(hybrid: Path) -> None:
    rng = random.Random(2)
    with Model(hybrid) as model, Context(model, replace(EXACT, n_slots=4)) as context:
        assert (context.n_rewind, context.n_seq_max) == (8, 4)
        with Context(model, EXACT) as alone:
            texts: list[list[int]] = [[] for _ in range(4)]
            for _ in range(60):
                seq_ids = rng.sample(range(4), rng.randrange(1, 5))
                n_same, n_drafts = rng.randrange(1 + len(seq_ids)), rng.randrange(1, 9)
                n_rows = [rng.choice((1, 2, 5, 12)) for _ in seq_ids]
                n_rows[len(n_rows) - n_same :] = [1 + n_drafts] * n_same
                new = [[rng.randrange(5, 300) for _ in range(n)] for n in n_rows]
                parts = [(chain(t, len(texts[s]), s), 0) for s, t in zip(seq_ids, new, strict=True)]
                rows, starts = pack(parts)
                output = context.decode(rows)
                s, tokens = seq_ids[-1], new[-1]
                alone.seq_rm(-1, 0, -1)
                expected = alone.decode(chain([*texts[s], *tokens], 0))
                last = expected.logits(len(texts[s]) + len(tokens) - 1)
                assert abs(output.logits(starts[-1] + len(tokens) - 1) - last).max() < 1e-3
                n_back = rows_back(rows, 8)
                for s, tokens in zip(seq_ids, new, strict=True):
                    texts[s] += tokens
                    if n := rng.randrange(1 + n_back.get(s, 0)):
                        del texts[s][-n:]
                        context.seq_rm(s, len(texts[s]), -1)
                    if len(texts[s]) > 80:
                        context.seq_rm(s, 0, -1)
                        texts[s] = []


def test_a_state_may_be_saved_and_restored_beside_others(hybrid: Path) -> None:
    with Model(hybrid) as model, Context(model, replace(EXACT, n_slots=2)) as context:
        expected = context.decode(chain([5, 6, 7], 0, 1)).logits(2).copy()
        context.seq_rm(1, 0, -1)
        context.decode(chain([5, 6], 0, 1))
        state = context.save(1)
        context.decode(pack([(chain([8], 0, 0), 0), (chain([9, 10], 2, 1), 0)])[0])
        with pytest.raises(CannotRewind):
            context.seq_rm(1, 1, -1)
        context.restore(1, state, 2)
        assert abs(context.decode(chain([7], 2, 1)).logits(0) - expected).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_do_not_change_the_text(engine: Engine, temperature: float) -> None:
    sampling = endless(engine, temperature)
    for _ in range(2):  # the second time a method knows the text
        texts = same_texts(engine, PROMPT, *METHODS, sampling=sampling, max_tokens=60)
    assert len(texts[0].token_ids) == 60
    assert texts[-1].stats.n_accepted > 0 or temperature > 0


def test_continued_and_different_prompts_start_from_a_clean_state(
    hybrid: Path, engine: Engine
) -> None:
    rng = random.Random(1)
    base = [rng.randrange(260, 290) for _ in range(200)]
    n_reused = []
    with Engine.load(hybrid, EXACT) as fresh:
        for _ in range(12):
            cached = engine.cache.tokens
            is_continued = rng.random() < 0.5 and 0 < len(cached) < 250
            prompt = [*cached, 270] if is_continued else [*base[: rng.randrange(5, 200)], 271]
            given = engine.generate(prompt, max_tokens=20).run()
            fresh.cache.truncate(0)
            expected = fresh.generate(prompt, method="ar", max_tokens=20).run()
            assert given.token_ids == expected.token_ids
            assert not is_continued or given.stats.n_reused == len(prompt) - 1
            n_reused.append(given.stats.n_reused if not is_continued else 0)
    assert max(n_reused) > 0  # from saved states


def test_another_reply_and_the_next_turn_reuse_the_prompt_almost_to_its_end(engine: Engine) -> None:
    chat = [{"role": "user", "content": "the cat saw a dog " * 6}]
    first = engine.chat(chat, max_tokens=20).run()
    again = engine.chat(chat, max_tokens=20).run()
    assert again.token_ids == first.token_ids
    n_kept = first.stats.n_prompt - 1 - TAIL
    assert again.stats.n_reused == n_kept
    # The next prompt renders the reply differently, as a template does that drops reasoning.
    chat += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a cat"}]
    third = engine.chat(chat, max_tokens=20).run()
    assert third.stats.n_reused == n_kept
    engine.cache.truncate(0)
    assert engine.chat(chat, max_tokens=20).run().token_ids == third.token_ids


@pytest.mark.parametrize("write", [write_hybrid_gguf, write_recurrent_gguf])
def test_texts_in_one_batch_are_what_they_would_be_alone(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    rng = random.Random(3)
    model, params = write(tmp_path / "model.gguf"), replace(EXACT, n_ctx=1024)
    drafting = (*METHODS, "suffix:p_min=0.05") if write is write_hybrid_gguf else ()
    requests = random_requests(rng, 40, ("ar", "auto", *drafting))
    several = Engine.load(model, params, parallel=4)
    with several as engine, Engine.load(model, EXACT) as alone:
        assert (engine.parallel, engine.context.n_seq_max) == (4, 4)
        running = []
        for i, request in enumerate(requests):
            running.append(engine.submit(**request))
            time.sleep(rng.choice((0.0, 0.0, 0.01)))
            if i % 9 == 5:
                running[i].cancel()
        for request, found in zip(requests, running, strict=True):
            expected = alone.generate(**{**request, "method": "ar"}).run()
            is_whole = found.run().finish_reason != "cancelled"
            assert (
                found.token_ids == expected.token_ids[: None if is_whole else len(found.token_ids)]
            ), request
        assert any(found.stats.n_accepted for found in running) == (write is write_hybrid_gguf)
        with pytest.raises(CannotRewind):
            engine.submit(PROMPT, method="lookahead").run()


@pytest.mark.parametrize("write", [write_hybrid_gguf, write_recurrent_gguf])
def test_conversations_that_take_turns_go_on_from_their_states(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    texts = [[260 + (i * step) % 40 for i in range(100)] for step in (1, 3)]
    with Engine.load(write(tmp_path / "model.gguf"), EXACT, parallel=2) as engine:
        places = engine._scheduler.places.places

        def reply(prompt: list[int]) -> tuple[list[int], int]:
            done = engine.submit(prompt, method="ar", max_tokens=9).run()
            return done.token_ids, done.stats.n_reused

        for turn in range(3):
            for i, text in enumerate(texts):
                tokens, n_reused = reply(text)
                assert n_reused == (0, 108, 127)[turn]
                assert [len(place.cache.tokens) for place in places].count(0) == 1
                texts[i] = [*text, *tokens, *range(270, 280)]
        edited = [*texts[0][:133], 271]  # the last message, of 138 tokens, ends differently
        again, n_reused = reply(edited)
        assert n_reused == 138 - 1 - TAIL
        for place in places:
            place.cache.truncate(0)
        engine._scheduler.places.idle._texts.clear()
        assert reply(edited) == (again, 0)


def test_a_method_that_needs_branches_is_refused(engine: Engine) -> None:
    for method in ("lookahead", "lookahead:window=2,ngram=3,guesses=1"):
        with pytest.raises(CannotRewind, match="one path of at most 8 drafts.*use auto"):
            engine.generate(PROMPT, method=method).run()
    unavailable = engine.unavailable()
    assert isinstance(unavailable["lookahead"], CannotRewind)
    assert "suffix" not in unavailable


def test_a_hybrid_model_drafts_for_another_and_for_itself(hybrid: Path, tmp_path: Path) -> None:
    plain_kv = write_tiny_gguf(tmp_path / "tiny.gguf")
    wide = "draft:width=3,p_min=0"  # the draft model has one sequence, so its tree is a chain
    for target in (hybrid, plain_kv):
        with Engine.load(target, EXACT, draft_model=hybrid) as engine:
            methods = ("draft:p_min=0,p_path=0,draft_max=4", wide, "auto")
            settings = {"sampling": endless(engine), "max_tokens": 40}
            _, alone, tree, _ = same_texts(engine, PROMPT, *methods, **settings)
            assert target != hybrid or alone.stats.acceptance_rate == 1.0
            assert tree.stats.n_drafted > 0


def test_only_plain_decoding_runs_if_no_copies_of_the_state_are_kept(
    hybrid: Path, tmp_path: Path
) -> None:
    recurrent = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    for path, n_rewind in ((hybrid, 0), (recurrent, 8)):  # llama.cpp keeps none for Mamba
        params = ContextParams(n_ctx=256, flash_attn="off", n_rewind=n_rewind)
        with Engine.load(path, params) as engine:
            assert engine.context.n_rewind == 0
            engine.prepare()
            assert engine.generate(PROMPT, max_tokens=5).run().stats.n_drafted == 0  # auto
            with pytest.raises(CannotRewind, match="recurrent or hybrid.*use method ar"):
                engine.generate(PROMPT, method="prompt-lookup").run()
            unavailable = engine.unavailable()
            assert all(isinstance(why, CannotRewind) for why in unavailable.values())
            assert "medusa" in unavailable
            assert unavailable.keys().isdisjoint(("ar", "auto"))


def test_n_batch_is_raised_above_the_number_of_copies_which_is_limited(hybrid: Path) -> None:
    with pytest.raises(InvalidParameter, match="n_rewind is 17; give 0 to 16"):
        ContextParams(n_rewind=17)
    with Engine.load(hybrid, replace(EXACT, n_batch=4)) as engine:
        assert engine.context.n_batch == 10
        assert engine.generate(PROMPT, max_tokens=5).run().stats.n_tokens > 0
