"""Draft models, bigram tables and measured costs, on real tiny models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import pytest

from batching.draft_context import DraftContext
from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.context import Context
from batching.llama.model import Model
from batching.llama.tune import use_fewest_threads
from batching.rows import Rows
from batching.together import run
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Method
from speculation.drafting.resources import Resources
from speculation.engine import Engine
from speculation.methods.draft_model import DraftModel, DraftModelParams
from speculation.sampling import SamplingParams, make_sampler
from tests.support import tiny_gguf
from tests.support.exact import EXACT, same_texts
from tests.support.fake_target import FakeTarget, fake_logits, prompt_of
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = "the cat saw a dog and the"


def test_every_draft_is_accepted_if_the_draft_model_is_the_target(tiny_model: Path) -> None:
    with Engine.load(tiny_model, EXACT, draft_model=tiny_model) as engine:
        stats = engine.generate(PROMPT, method="draft:p_min=0,p_path=0", max_tokens=40).run().stats
    assert stats.tokens_per_step > 7  # nine per step, except in the last one


def test_a_draft_model_trained_for_shorter_texts_drafts_as_far_as_it_can_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    short = write_tiny_gguf(tmp_path / "short.gguf", n_ctx=256)
    with Engine.load(tiny_model, EXACT, draft_model=short) as engine:
        assert engine.draft is not None
        assert (engine.draft.n_ctx, engine.context.n_ctx) == (256, 512)
        for prompt, drafts in (([5] * 100, True), ([5] * 200, True), ([5] * 300, False)):
            _, ours = same_texts(engine, prompt, "draft:p_min=0,p_path=0", max_tokens=100)
            assert (ours.stats.n_drafted > 0) == drafts


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_first_difference(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = list(tiny_gguf.WORDS)
    words[3] = "zebra"
    monkeypatch.setattr(tiny_gguf, "WORDS", tuple(words))
    other = write_tiny_gguf(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedModel, match=r"other.gguf cannot draft .* is 'zebra'"):
        Engine.load(tiny_model, EXACT, draft_model=other)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_bos_token_must_match_if_it_is_added(tmp_path: Path, add_bos: bool) -> None:
    target = write_tiny_gguf(tmp_path / "target.gguf", add_bos=add_bos)
    other = write_tiny_gguf(tmp_path / "other.gguf", bos=11, add_bos=add_bos)
    if add_bos:
        with pytest.raises(UnsupportedModel, match="the bos it adds to a text is 11, .* 1;"):
            Engine.load(target, EXACT, draft_model=other)
    else:
        Engine.load(target, EXACT, draft_model=other).close()


@pytest.mark.parametrize(("time_ratio", "n_threads"), [(0.9, 2), (0.92, 1), (1.05, 1)])
def test_a_draft_model_that_threads_do_not_speed_up_gets_one_thread(
    tiny_model: Path,
    tiny_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    time_ratio: float,
    n_threads: int,
) -> None:
    monkeypatch.setattr("batching.llama.tune.time_ratio", lambda *_: time_ratio)
    with Engine.load(tiny_model, replace(EXACT, n_threads=2), draft_model=tiny_draft) as engine:
        assert engine.draft is not None
        handle = engine.draft.native.handle
        assert C.llama_n_threads(handle) == engine.draft.n_threads == n_threads
        assert C.llama_n_threads_batch(handle) == 2
        assert engine.context.n_threads == 2


def test_measuring_threads_leaves_the_context_unchanged(tiny_model: Path) -> None:
    with Model(tiny_model) as model, Context(model, replace(EXACT, n_threads=2)) as context:
        use_fewest_threads(context)
        assert context.n_threads in (1, 2)
        assert C.llama_n_threads_batch(context.native.handle) == 2
        context.decode(Rows([5], [0], [range(1)], [True]))  # the cache is empty again


def lengths(**params: float) -> list[int]:
    """Lengths of the first drafts of 40 texts, with a draft model that is not always certain."""
    drafter = DraftModel(DraftModelParams(**params), DraftContext(FakeTarget()))  # type: ignore[arg-type]
    found = []
    for seed in range(40):
        prompt = prompt_of(seed)
        drafter.begin(prompt)
        tree = TokenTree(prompt[-1])
        run(drafter.draft(prompt, tree, DraftBudget()))
        found.append(len(tree) - 1)
    return found


def test_a_chain_ends_when_the_whole_chain_is_unlikely_to_be_accepted() -> None:
    free, shorter, bound = (
        lengths(p_min=0.3, p_path=p_path, draft_max=6) for p_path in (0.0, 0.2, 0.95)
    )
    assert all(a >= b for a, b in zip(free, shorter, strict=True))
    assert sum(free) > sum(shorter) > 0
    assert set(bound) == {0}  # even the most certain draft is estimated at 92%


def test_rejection_refuses_samplers_without_a_distribution(engine: Engine) -> None:
    settings: dict[str, Any] = {
        "method": "draft:verify=rejection,p_min=0",
        "temperature": 1.0,
        "max_tokens": 5,
    }
    refused: dict[str, Any]
    for refused in ({"mirostat": 2}, {"xtc_probability": 0.5}, {"grammar": 'root ::= "a"+'}):
        with pytest.raises(InvalidParameter, match="verify=match"):
            engine.generate(PROMPT, **settings, **refused).run()


def test_rejection_at_temperature_zero_gives_the_text_of_plain_decoding(engine: Engine) -> None:
    same_texts(engine, PROMPT, "draft:verify=rejection,p_min=0", max_tokens=40)


@pytest.mark.parametrize(
    "method", ["draft:p_min=0,p_path=0,draft_max=2", "draft:width=2,p_min=0,nodes=6"]
)
def test_rejection_keeps_the_distribution_of_the_second_token(engine: Engine, method: str) -> None:
    # top-k leaves few tokens, so that 400 texts can tell distributions apart.
    sampling = SamplingParams(temperature=0.7, top_k=3, repeat_penalty=1.2)
    first = engine.generate(PROMPT, method="ar", max_tokens=1).run().token_ids
    prompt = [*engine.model.tokenize(PROMPT), *first]
    n = 400

    def counts(method: str) -> Counter[tuple[int, ...]]:
        settings: dict[str, Any] = {"method": method, "sampling": sampling, "max_tokens": 2}
        texts = (engine.generate(prompt, **{**settings, "seed": seed}).run() for seed in range(n))
        return Counter(tuple(text.token_ids) for text in texts)

    plain, ours = counts("ar"), counts(f"{method},verify=rejection")
    assert set(ours) == set(plain)
    chi = sum((ours[key] - plain[key]) ** 2 / (ours[key] + plain[key]) for key in plain)
    freedom = len(plain) - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom)


def test_a_text_with_sampled_drafts_frees_all_its_samplers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        function = getattr(C, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(C, name, call)

    makers = "llama_sampler_chain_init", "llama_sampler_clone", "llama_sampler_init_dist"
    for name in (*makers, "llama_sampler_free"):
        counted(name)
    sampling = SamplingParams(temperature=1.0, repeat_penalty=1.2)
    kept: list[Drafter] = []  # so nothing is freed for want of an owner
    make = Method.drafters

    def drafters(method: Method, resources: Resources) -> list[Drafter]:
        made = make(method, resources)
        kept.extend(made)
        return made

    monkeypatch.setattr(Method, "drafters", drafters)
    for _ in range(3):
        method = "draft:verify=rejection,p_min=0"
        engine.generate(PROMPT, method=method, sampling=sampling, max_tokens=20).run()
    assert len(kept) == 3
    n_made = sum(map(calls.count, makers))
    assert n_made > 3 * 4
    assert calls.count("llama_sampler_free") == n_made


def test_the_reported_probabilities_are_those_the_sampler_draws_from(engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, top_k=4, min_p=0.05, logit_bias={270: 2.0})
    logits = np.random.default_rng(0).standard_normal(engine.model.n_vocab).astype(np.float32)
    chain = make_sampler(params, engine.model, engine.context.n_ctx)
    p = chain.probabilities(logits)
    biased = logits.copy()
    biased[270] += 2.0
    top = biased.argsort()[-4:]
    expected = np.exp((biased[top] - biased[top].max()) / 0.8)
    expected /= expected.sum()
    assert p.sum() == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(p[top], expected, atol=1e-5)


def chain(levels: DraftContext, text: Sequence[int], n: int) -> list[int]:
    """The likeliest continuation, n tokens, decoded level by level."""
    output = run(levels.root(text))
    token = output.argmax(levels.root_row)
    found = [token]
    while len(found) < n:
        token = run(levels.level([0], [token])).argmax(0)
        found.append(token)
    return found


def test_an_accepted_chain_is_not_decoded_again() -> None:
    target = FakeTarget()
    levels = DraftContext(target)
    text = [1, 2, 3, 4]
    levels.begin(text)
    drafted = chain(levels, text, 4)
    target.decoded.clear()
    text += [*drafted[:3], 9]  # three drafts were accepted, then another token followed
    assert chain(levels, text, 2)[0] == int(fake_logits(tuple(text)).argmax())
    assert [len(rows) for rows in target.decoded] == [1, 1]


def test_a_prompt_is_read_for_the_first_tree_and_what_is_cached_of_it_is_not() -> None:
    target = FakeTarget()
    levels = DraftContext(target)
    levels.begin(text := [1, 2, 3, 4])
    assert target.decoded == []
    assert levels.n_unread(text) == 3
    drafted = chain(levels, text, 3)
    assert [len(rows) for rows in target.decoded] == [4, 1, 1]
    # The chain's last token was not decoded, and two were not asked for.
    text += [*drafted, 9, 8]
    assert levels.n_unread(text) == 2
    levels.begin([1, 2, 3, 9])
    assert levels.n_unread([1, 2, 3, 9, 9]) == 1


def test_each_path_of_a_tree_sees_only_its_own_tokens() -> None:
    target = FakeTarget()
    levels = DraftContext(target)
    text = [1, 2, 3]
    for n_leaves in (3, 4):
        levels.begin(text, n_leaves)
        run(levels.root(text))
        run(levels.level([0, 0, 0], [5, 6, 7]))
        output = run(levels.level([1, 1, 2], [8, 9, 8]))
        for row, path in enumerate([(6, 8), (6, 9), (7, 8)]):
            np.testing.assert_array_equal(output.logits(row), fake_logits((*text, *path)))
        output = run(levels.level([1], [4]))
        np.testing.assert_array_equal(output.logits(0), fake_logits((*text, 6, 9, 4)))
        text = [*text, 6]
