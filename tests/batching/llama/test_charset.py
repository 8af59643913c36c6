"""Characters that a vocabulary cannot spell, and the end token it would append."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from batching.llama.model import Model
from speculation.engine import Engine
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def without_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    with Engine.load(write_tiny_gguf(folder / "few.gguf", n_bytes=0), EXACT) as engine:
        yield engine


def test_a_character_without_tokens_is_named_and_the_engine_stays_usable(
    without_bytes: Engine,
) -> None:
    with pytest.raises(InvalidParameter, match="has no token for 'Z' or its bytes; remove it"):
        without_bytes.generate("a catZ")
    assert without_bytes.generate("a cat é", method="ar", max_tokens=3).run().token_ids


def test_control_tokens_are_parsed_without_their_characters_in_the_vocabulary(
    without_bytes: Engine,
) -> None:
    model = without_bytes.model
    assert model.tokenize("<|user|>a", parse_special=True)[1] == 4
    with pytest.raises(InvalidParameter, match="has no token for '<'"):
        model.tokenize("<|user|>a")


def test_byte_tokens_can_spell_every_character(engine: Engine) -> None:
    assert engine.model.tokenize("Z", add_special=False) == [3 + ord("Z")]


def test_costs_can_be_measured_with_a_small_vocabulary(without_bytes: Engine) -> None:
    assert without_bytes.model.n_vocab == 49
    without_bytes.prepare()


def test_no_eos_is_appended_to_a_prompt(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "ends.gguf", more=lambda w: w.add_add_eos_token(True))
    with Model(path) as model:
        assert model.special_token("eos") == 2
        assert model.tokenize("a")[0] == 1
        assert 2 not in model.tokenize("a")
        assert model.tokenize("</s>", parse_special=True) == [1, 2]
