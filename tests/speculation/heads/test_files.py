"""Files of heads of all kinds: broken ones and those of other models are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batching.errors import HeadsError, TruncatedGGUF, UnsupportedModel, VocabularyMismatch
from batching.gguf.reader import fingerprint
from batching.llama import private_api
from batching.llama.model import Model
from speculation.engine import Engine
from tests.speculation.methods import test_eagle, test_medusa, test_redrafter
from tests.support import tiny_gguf
from tests.support.exact import EXACT
from tests.support.head_checks import load_heads, started
from tests.support.tiny_dflash import write_tiny_dflash
from tests.support.tiny_eagle3 import write_tiny_eagle3
from tests.support.tiny_gguf import write_tiny_gguf

OWN: dict[str, Callable[[Path, Path], Path]] = {
    "medusa": lambda path, target: test_medusa.write_heads(
        path, target, test_medusa.random_weights()
    ),
    "redrafter": lambda path, target: test_redrafter.write_head(
        path, target, test_redrafter.random_weights()
    ),
    "eagle": test_eagle.write_head,
}
LLAMA: dict[str, Callable[..., Path]] = {"eagle-3": write_tiny_eagle3, "dflash": write_tiny_dflash}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, of which heads in llama.cpp's formats read the last three's inputs"""
    return write_tiny_gguf(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


@pytest.mark.parametrize("kind", OWN)
def test_heads_of_another_model_are_refused_with_both_names(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = OWN[kind](tmp_path / "head.gguf", target)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    with pytest.raises(HeadsError, match=r"head\.gguf were trained on 'tiny'.*other\.gguf"):
        Engine.load(other, EXACT, heads=path)


@pytest.mark.parametrize("kind", LLAMA)
def test_heads_in_llama_cpps_formats_may_name_their_target(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = tmp_path / "head.gguf"
    own = {"heads.target.name": "somebody"}
    with Model(target) as model:
        LLAMA[kind](path, metadata={**own, "heads.target.fingerprint": "0123456789abcdef"})
        with pytest.raises(HeadsError, match=r"trained on 'somebody' .*0123456789abcdef"):
            load_heads([path], model)
        LLAMA[kind](path, metadata={**own, "heads.target.fingerprint": fingerprint(target)})
        load_heads([path], model)[kind].close()


@pytest.mark.parametrize("kind", LLAMA)
def test_heads_for_other_layers_or_tokens_are_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "head.gguf"
    with Model(target) as model:
        LLAMA[kind](path, layers=(1, 2, 5))
        with pytest.raises(UnsupportedModel, match="the input of layer 5"):
            load_heads([path], model)
        words = list(tiny_gguf.WORDS)
        words[3] = "zebra"
        monkeypatch.setattr(tiny_gguf, "WORDS", tuple(words))
        LLAMA[kind](path)
        with pytest.raises(VocabularyMismatch, match=r"head\.gguf cannot draft"):
            load_heads([path], model)


@pytest.mark.parametrize("kind", LLAMA)
def test_a_target_whose_layer_inputs_are_not_exposed_is_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = LLAMA[kind](tmp_path / "head.gguf")
    monkeypatch.setattr(private_api, "EXPOSES_LAYER_INPUTS", ("qwen3",))
    with pytest.raises(UnsupportedModel, match="layer inputs llama.cpp does not expose"):
        Engine.load(target, EXACT, heads=path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("kind", [*OWN, *LLAMA])
def test_a_truncated_file_is_reported(
    tmp_path: Path, target: Path, kind: str, share: float
) -> None:
    path = tmp_path / "head.gguf"
    whole = (OWN[kind](path, target) if kind in OWN else LLAMA[kind](path)).read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with Model(target) as model, pytest.raises(TruncatedGGUF, match=r"head\.gguf is incomplete"):
        load_heads([path], model)


@pytest.mark.parametrize("kind", [*OWN, *LLAMA])
def test_only_heads_with_a_context_differ_from_text_to_text(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = tmp_path / "head.gguf"
    path = OWN[kind](path, target) if kind in OWN else LLAMA[kind](path)
    with started(path, target, kind) as head:
        views = [head.of_slot(i, 2) for i in range(2)]
        if kind in ("medusa", "redrafter"):
            assert views == [head, head]
        else:
            assert len({id(one.context) for one in (head, *views)}) == 3
