"""Files of heads of all kinds: written and read again; broken and unsuitable ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import (
    ModelError,
    UnsupportedModel,
)
from batching.gguf.reader import GGUFFile, fingerprint
from batching.llama import private_api
from batching.llama.model import Model
from speculation.drafter import MethodSpec
from speculation.engine import Engine
from speculation.heads import load, medusa, redrafter
from speculation.heads.base import Head
from speculation.heads.eagle import write_eagle
from speculation.heads.file import HeadsFile, HeadsInfo, HeadsKind, llama_format
from speculation.heads.load import require_no_heads
from speculation.heads.medusa import write_medusa
from speculation.heads.redrafter import write_redrafter
from speculation.methods import METHODS, MethodTable
from tests.support import tiny_gguf
from tests.support.exact import EXACT
from tests.support.head_checks import load_heads, started
from tests.support.tiny_gguf import N_TINY, write_model, write_tiny_gguf
from tests.support.tiny_heads import (
    DRAFTED,
    HEADS,
    SHAPE,
    eagle_tensors,
    matrix,
    medusa_weights,
    redrafter_weights,
    write_medusa_heads,
    write_tiny_dflash,
)

OWN, LLAMA = [*HEADS][:3], [*HEADS][3:]
NARROW = "it cannot share .* 'tiny', which is 32 wide"


# Written and read again


@pytest.mark.parametrize("kind", ["medusa", "redrafter"])
def test_heads_are_the_same_after_a_round_trip_through_their_file(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path, tokens = tmp_path / "heads.gguf", [5, 6, 280]
    HEADS[kind](path, target, n_blocks=2, tokens=tokens)
    if kind == "medusa":
        written, shapes = medusa_weights(n_blocks=2, tokens=tokens), medusa.shapes(3, 2, 32)
    else:
        written, shapes = redrafter_weights(n_blocks=2, tokens=tokens), redrafter.shapes(32, 2)
    file = HeadsFile(path)
    again = file.weights(shapes, target)
    assert again.tensors.keys() == written.tensors.keys()
    for name, ours in again.tensors.items():
        np.testing.assert_allclose(ours, written.tensors[name], atol=1e-3)
    assert (file.info.method, file.info.target_name) == (kind, "tiny")
    assert again.tokens is not None and again.tokens.tolist() == tokens
    assert not any(name.endswith("output.weight") for name in file.gguf.tensors)
    np.testing.assert_array_equal(again.output, GGUFFile(target).output_matrix()[tokens])


@pytest.mark.parametrize("kind", HEADS)
def test_only_heads_with_a_context_differ_from_text_to_text(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = HEADS[kind](tmp_path / "head.gguf", target)
    with started(path, target, kind) as head:
        views = [head.of_slot(i, 2) for i in range(2)]
        if kind in ("medusa", "redrafter"):
            assert views == [head, head]
        else:
            assert len({id(one.context) for one in (head, *views)}) == 3


def test_a_method_can_bring_a_kind_of_heads_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    write_model(path, "my-heads", (32, 1), {}, {})
    own, contained = Head(), Head()
    mine = llama_format("mine", "my-heads", lambda gguf, model: own)
    inside = HeadsKind("inside", lambda gguf: False, mine.load, lambda model: contained)
    spec = MethodSpec("mine", "Mine", lambda params, resources: None, heads=(mine, inside))
    kinds = MethodTable([spec]).heads_kinds()
    with Model(tiny_model) as model:
        with pytest.raises(ModelError):
            load.load_heads([path], model, METHODS.heads_kinds())
        assert load.load_heads([path], model, kinds) == {"mine": own, "inside": contained}
    require_no_heads(path, METHODS.heads_kinds())
    with pytest.raises(ModelError, match="contains drafting heads, not a model"):
        require_no_heads(path, kinds)


# Refused


def test_files_without_heads_are_refused(tmp_path: Path, target: Path) -> None:
    text, owl = tmp_path / "heads.txt", tmp_path / "x.gguf"
    text.write_text("something else", encoding="utf-8")
    with Model(target) as model:
        write_medusa(owl, HeadsInfo.of_target("owl", model), medusa_weights())
        reason: type[Exception]
        for path, reason, message in (
            (target, ModelError, "no drafting heads: its architecture is 'llama'"),
            (text, ModelError, "is not a model in the GGUF format"),
            (tmp_path / "none.gguf", ModelError, "file not found"),
            (owl, ModelError, "method 'owl', which this version does not support"),
        ):
            with pytest.raises(reason, match=message):
                load_heads([path], model)


def test_two_files_for_one_method_are_refused(tmp_path: Path, target: Path) -> None:
    paths = [write_medusa_heads(tmp_path / f"{n}.gguf", target) for n in range(2)]
    with pytest.raises(ModelError, match=r"0\.gguf and 1\.gguf are both heads for medusa"):
        Engine.load(target, EXACT, heads=paths)


def test_a_head_is_not_a_model_and_must_be_given_with_heads(tmp_path: Path, target: Path) -> None:
    own = {"token_embd.weight": matrix(N_TINY, 32), "output.weight": matrix(N_TINY, 32)}
    for tensors in ({}, own):
        path = write_tiny_dflash(tmp_path / "head.gguf", tensors=tensors)
        with pytest.raises(ModelError, match=r"head\.gguf contains drafting heads, not a model"):
            Engine.load(path, EXACT)
        with pytest.raises(ModelError, match=r"head\.gguf contains drafting heads, not a model"):
            Engine.load(target, EXACT, draft_model=path)


@pytest.mark.parametrize(
    ("kind", "n_embd", "made", "reason"),
    [
        ("medusa", 32, {"n_embd": 16}, r"head\.0\.block\.0\.weight is 16 × 16.*32 × 32"),
        ("medusa", 16, {"n_embd": 16}, r"states is 16 in head\.gguf, but 32 in 'tiny'"),
        ("redrafter", 32, {"n_embd": 16}, r"token\.weight is 16 × 16.*32 × 32"),
        ("redrafter", 16, {"n_embd": 16}, r"states is 16 in head\.gguf, but 32 in 'tiny'"),
        ("eagle", 32, {"n_embd": 16}, r"fc\.weight is 16 × 32; .* need 32 × 64"),
        ("eagle", 32, {"n_ff": 48}, r"ffn_gate\.weight is 64 × 32; .* need 48 × 32"),
        ("eagle", 32, {"n_head": 3}, "32 wide do not split into 3 attention heads with 2"),
        ("eagle", 32, {"tokens": [1, N_TINY]}, f"has tokens outside 0 to {N_TINY - 1}"),
    ],
)
def test_heads_of_the_wrong_size_are_refused(
    tmp_path: Path, target: Path, kind: str, n_embd: int, made: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "head.gguf"
    with Model(target) as model:
        info = replace(HeadsInfo.of_target(kind, model), n_embd=n_embd)
        if kind == "medusa":
            write_medusa(path, info, medusa_weights(**made))
        elif kind == "redrafter":
            write_redrafter(path, info, redrafter_weights(**made))
        else:
            tokens = np.array(made.pop("tokens"), np.int32) if "tokens" in made else None
            shape = replace(SHAPE, **made)
            tensors = eagle_tensors(shape if "n_embd" in made else SHAPE)
            write_eagle(path, info, shape, tensors, tokens=tokens, kind="f32")
        with pytest.raises(ModelError, match=reason):
            load_heads([path], model)


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "eagle-3": [
        ({"n_target": 48}, "hidden states 48 wide, but those of 'tiny' are 32 wide; use the head"),
        ({"n_embd": 64}, rf"64 wide and has no token_embd\.weight; {NARROW}"),
        (
            {"n_embd": 64, "tensors": {"token_embd.weight": matrix(N_TINY, 64)}},
            rf"64 wide and has no output\.weight; {NARROW}",
        ),
        (
            {"tensors": {"token_embd.weight": matrix(9, 32)}},
            f"has embeddings of 9 tokens, but 'tiny' has {N_TINY}",
        ),
        ({"layers": (1, 2)}, r"lists \[1, 2\] as the layers it reads, .* that read three"),
        ({"layers": (1, 2, 4)}, r"inputs of layers \[1, 2, 4\], but 'tiny' has layers 0 to 3"),
        ({"metadata": {"eagle3.block_count": 2}}, "2 layers, but llama.cpp runs .* heads with one"),
        ({"metadata": {"split.count": 2}}, "is one of 2 files; join them"),
        (
            {"tensors": {"blk.0.attn_q.bias": matrix(32), "blk.0.attn_k.bias": matrix(16)}},
            r"has blk\.0\.attn_k\.bias, blk\.0\.attn_q\.bias, which llama\.cpp ignores",
        ),
        (
            {"tensors": {"enc.output_norm.weight": matrix(96)}},
            r"has enc\.output_norm\.weight, which llama\.cpp ignores",
        ),
        (
            {"tokens": DRAFTED, "tensors": {"d2t": None}},
            f"has {len(DRAFTED)} logits and no d2t to map them to the {N_TINY} tokens",
        ),
        (
            {"tokens": DRAFTED, "tensors": {"output.weight": None}},
            f"a d2t of {len(DRAFTED)} tokens, but the model's shared output.weight has",
        ),
        (
            {"tokens": DRAFTED, "tensors": {"output.weight": matrix(3, 32)}},
            f"a d2t of {len(DRAFTED)} tokens, but its output.weight has 3 rows",
        ),
        ({"tokens": (1, 2, N_TINY)}, f"drafts tokens from 1 to {N_TINY}, but 'tiny' has"),
        ({"tokens": (0, 0, 1, 1, 7)}, "has duplicate tokens in d2t: it may store differences"),
        (
            {"tokens": (1, 2), "tensors": {"d2t": np.array([1, 2], np.int32)}},
            "has a d2t of type 26, but llama.cpp reads 64-bit integers",
        ),
    ],
    "dflash": [
        ({"layers": (1, 2, 4)}, r"inputs of layers \[1, 2, 4\], but 'tiny' has layers 0 to 3"),
        ({"metadata": {"split.count": 2}}, "is one of 2 files; join them"),
        ({"n_embd": 64}, "hidden states 64 wide, but those of 'tiny' are 32 wide; use the head"),
        ({"metadata": {"dflash.target_layers": None}}, "lists None as the layers it reads"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": None}}, "has the mask token None"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": N_TINY}}, f"has the mask token {N_TINY}"),
        ({"block_size": 1}, "has blocks of 1 tokens"),
        ({"tensors": {"markov_w1.weight": matrix(N_TINY, 8)}}, "is one of DSpark; use a head of D"),
        ({"tensors": {"selector_hidden.weight": matrix(8, 32)}}, "is one of DFlash 2; use a head"),
        ({"metadata": {"dflash.attention.value_length": 4}}, "keys 8 wide and values 4 wide"),
        (
            {"tensors": {"output.weight": matrix(9, 32)}},
            f"has 9 logits and no d2t to map them to the {N_TINY} tokens",
        ),
        ({"tensors": {"blk.0.attn_q.bias": matrix(32)}}, "head.gguf"),  # unknown to llama.cpp
    ],
}


@pytest.mark.parametrize(
    ("kind", "head", "reason"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_heads_that_llama_cpp_cannot_run_are_refused_before_it_loads_them(
    tmp_path: Path, target: Path, kind: str, head: dict[str, Any], reason: str
) -> None:
    path = HEADS[kind](tmp_path / "head.gguf", **head)
    with Model(target) as model, pytest.raises(ModelError, match=reason) as refused:
        load_heads([path], model)
    assert "head.gguf" in str(refused.value)


@pytest.mark.parametrize("kind", OWN)
def test_heads_of_another_model_are_refused_with_both_names(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = HEADS[kind](tmp_path / "head.gguf", target)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    with pytest.raises(ModelError, match=r"head\.gguf were trained on 'tiny'.*other\.gguf"):
        Engine.load(other, EXACT, heads=path)


@pytest.mark.parametrize("kind", LLAMA)
def test_heads_in_llama_cpps_formats_may_name_their_target(
    tmp_path: Path, target: Path, kind: str
) -> None:
    path = tmp_path / "head.gguf"
    own = {"heads.target.name": "somebody"}
    with Model(target) as model:
        HEADS[kind](path, metadata={**own, "heads.target.fingerprint": "0123456789abcdef"})
        with pytest.raises(ModelError, match=r"trained on 'somebody' .*0123456789abcdef"):
            load_heads([path], model)
        HEADS[kind](path, metadata={**own, "heads.target.fingerprint": fingerprint(target)})
        load_heads([path], model)[kind].close()


@pytest.mark.parametrize("kind", LLAMA)
def test_heads_for_other_layers_or_tokens_are_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "head.gguf"
    with Model(target) as model:
        HEADS[kind](path, layers=(1, 2, 5))
        with pytest.raises(UnsupportedModel, match="the input of layer 5"):
            load_heads([path], model)
        words = list(tiny_gguf.WORDS)
        words[3] = "zebra"
        monkeypatch.setattr(tiny_gguf, "WORDS", tuple(words))
        HEADS[kind](path)
        with pytest.raises(UnsupportedModel, match=r"head\.gguf cannot draft"):
            load_heads([path], model)


@pytest.mark.parametrize("kind", LLAMA)
def test_a_target_whose_layer_inputs_are_not_exposed_is_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = HEADS[kind](tmp_path / "head.gguf")
    monkeypatch.setattr(private_api, "EXPOSES_LAYER_INPUTS", ("qwen3",))
    with pytest.raises(UnsupportedModel, match="layer inputs llama.cpp does not expose"):
        Engine.load(target, EXACT, heads=path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("kind", HEADS)
def test_a_truncated_file_is_reported(
    tmp_path: Path, target: Path, kind: str, share: float
) -> None:
    path = HEADS[kind](tmp_path / "head.gguf", target)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with Model(target) as model, pytest.raises(ModelError, match=r"head\.gguf is incomplete"):
        load_heads([path], model)


def test_missing_library_functions_are_reported(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_dflash(tmp_path / "head.gguf")
    name = "llama_set_embeddings_nextn"
    with monkeypatch.context() as patch:
        patch.setitem(private_api.FUNCTIONS, name, None)
        with pytest.raises(UnsupportedModel, match=f"does not export {name}"):
            Engine.load(target, EXACT, heads=path)
