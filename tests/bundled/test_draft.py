"""The bundled draft model: the same vocabulary, a small file, and mostly the target's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp.llama_cpp as native
import pytest

from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import Rows
from speculation.chat.template import chat_prompt
from speculation.engine import Engine
from speculation.registry import read_registry, resolve

# From the tasks in the model card: small talk, copying, facts from the context, a list.
QUESTIONS = (
    "Hello!",
    "What can you do?",
    "Repeat this: The kettle sang while Zelda counted 47 blue stamps.",
    "Quote the second sentence: The train was late. Nobody minded. Old Tobias sang a song.",
    "Turn this into bullet points: tea, milk, sugar and bread",
    "Extract the dates: We met on 3 May 1987 and married on 12 June 1990.",
    "Greta bought 14 lamps in Oslo. Ivan lives in Lima and works as a baker. What did Greta buy?",
    "I want to book a table for two in San Jose.",
    "What does brave mean?",
    "Tell me a short story about a fox.",
)


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    with Engine.load("bundled", ContextParams(n_threads=1, n_seq_max=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def draft() -> Iterator[Model]:
    with Model(resolve("bundled-draft")) as model:
        yield model


def test_the_draft_is_small_and_has_the_targets_vocabulary_and_template(
    target: Engine, draft: Model
) -> None:
    assert read_registry()["bundled"].draft == "bundled-draft"
    assert draft.n_vocab == target.model.n_vocab == 4096
    for token in range(4096):
        assert facts(draft, token) == facts(target.model, token), token
    for name in ("bos", "eos", "eot"):
        assert draft.special_token(name) == target.model.special_token(name)
    assert draft.chat_template is not None
    assert draft.chat_template == target.model.chat_template
    assert draft.n_params <= 1_000_000
    assert draft.description == "llama 951K Q8_0"
    assert draft.path.stat().st_size <= 2_000_000


def test_the_draft_models_first_choice_mostly_matches_the_target(
    target: Engine, draft: Model
) -> None:
    agreed = total = 0
    with Context(draft, ContextParams(n_threads=1, n_seq_max=1)) as context:
        for question in QUESTIONS:
            prompt = chat_prompt(target.model, [{"role": "user", "content": question}]).tokens
            reply = target.generate(prompt, method="ar", max_tokens=48).run().token_ids
            ids = [*prompt, *reply][:-1]
            context.seq_rm(-1, 0, -1)
            rows = Rows(ids, range(len(ids)), [range(1)] * len(ids), [True] * len(ids))
            output = context.decode(rows)
            choices = [output.argmax(row) for row in range(len(prompt) - 1, len(ids))]
            agreed += sum(a == b for a, b in zip(choices, reply, strict=True))
            total += len(reply)
    assert total > 100
    assert agreed > 0.75 * total, f"{agreed} of {total}"


def facts(model: Model, token: int) -> tuple[bytes, float, int]:
    """Text, score and attributes of a token."""
    return (
        native.llama_vocab_get_text(model.vocab, token),
        native.llama_vocab_get_score(model.vocab, token),
        native.llama_vocab_get_attr(model.vocab, token),
    )


def test_with_a_width_the_draft_model_drafts_trees() -> None:
    with Engine.load("bundled", ContextParams(n_threads=1), draft_model="paired") as engine:
        chains, trees = (
            [engine.chat(q, method=m, max_tokens=40).run().stats for q in QUESTIONS[:5]]
            for m in ("draft", "draft:width=3")
        )
        assert engine.cache.n_seq > 1
    assert sum(s.n_rows for s in trees) > 1.2 * sum(s.n_rows for s in chains)
    assert sum(s.n_steps for s in trees) <= sum(s.n_steps for s in chains)
