"""Grammars that wait for a trigger in the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batching.errors import GrammarError, InvalidParameter
from batching.llama.model import Model
from batching.llama.sampler import SamplerChain
from speculation.sampling import SamplingParams, make_sampler

GBNF = 'root ::= "an" digit\ndigit ::= [0-9]'


class Wishes:
    """Logits that prefer the given tokens, in this order, to all others."""

    def __init__(self, n_vocab: int, *tokens: int) -> None:
        self._logits = np.zeros(n_vocab, np.float32)
        self._logits[list(tokens)] = range(20 * len(tokens), 0, -20)

    def logits(self, row: int) -> object:
        return self._logits


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


def written(model: Model, triggers: tuple[str, ...], *wishes: tuple[bytes, ...]) -> list[bytes]:
    """What a sampler with a lazy grammar draws when the model wants one of some tokens at a time,
    the first one most."""
    ids = {model.piece(token): token for token in reversed(range(model.n_vocab))}
    params = SamplingParams(grammar=GBNF, grammar_triggers=triggers, temperature=1.0)
    sampler = make_sampler(params, model, 512)
    assert isinstance(sampler, SamplerChain)
    try:
        outputs = [Wishes(model.n_vocab, *(ids[piece] for piece in wish)) for wish in wishes]
        return [model.piece(sampler.sample(output, 0)) for output in outputs]  # type: ignore[arg-type]
    finally:
        sampler.close()


def test_before_its_trigger_a_grammar_allows_everything(model: Model) -> None:
    assert written(model, ("an",), (b"x",), (b"</s>", b"a"), (b"a",)) == [b"x", b"</s>", b"a"]


@pytest.mark.parametrize(
    ("trigger", "wishes", "expected"),
    [
        ("an", [(b"a",), (b"n",), (b"x", b"7"), (b"x", b"</s>")], [b"a", b"n", b"7", b"</s>"]),
        ("an", [(b"an",), (b"x", b"7")], [b"an", b"7"]),
        ("saw()", [(b" saw",), (b" a", b"an"), (b"n", b"7")], [b" saw", b"an", b"7"]),
        (r"\Ad[\s\S]*(an)", [(b"d",), (b" a",), (b"n",), (b"x", b"7")], [b"d", b" a", b"n", b"7"]),
    ],
)
def test_after_its_trigger_a_grammar_holds_the_text(
    model: Model, trigger: str, wishes: list[tuple[bytes, ...]], expected: list[bytes]
) -> None:
    assert written(model, (trigger,), *wishes) == expected


def test_a_token_that_goes_on_against_the_grammar_after_the_trigger_is_not_drawn(
    model: Model,
) -> None:
    wishes = [(b" ",), (b" cat", b" dog", b"an"), (b"7",)]
    assert written(model, ("(ca)|(do)",), *wishes) == [b" ", b"an", b"7"]
    assert written(model, (" ?(c|d)",), *wishes) == [b" ", b"an", b"7"]


def test_a_part_of_the_token_with_the_trigger_may_belong_to_the_grammar(model: Model) -> None:
    assert written(model, ("(an)d",), (b" and", b"x")) == [b"x"]
    assert written(model, (" (a)",), (b" a",), (b"x", b"n"), (b"7",)) == [b" a", b"n", b"7"]


def test_a_token_that_is_accepted_against_the_grammar_is_an_error(model: Model) -> None:
    sampler = SamplerChain(model).grammar(GBNF, triggers=["c"]).greedy()
    (token,) = [t for t in range(model.n_vocab) if model.piece(t) == b" cat"]
    with pytest.raises(GrammarError, match=f"the grammar does not allow token {token} here"):
        sampler.accept(token)
    with pytest.raises(InvalidParameter, match="need a distribution"):
        sampler.probabilities(np.zeros(model.n_vocab, np.float32))
    sampler.close()


def test_triggers_must_be_regular_expressions_and_need_a_grammar(model: Model) -> None:
    with pytest.raises(GrammarError, match=r"grammar trigger '\(' is not a regular expression"):
        written(model, ("(",))
    with pytest.raises(InvalidParameter, match="grammar_triggers need a grammar"):
        SamplingParams(grammar_triggers=("a",))
