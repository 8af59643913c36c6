"""Which files and models heads are loaded from, by the kinds that the methods declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from batching.errors import HeadsError
from batching.llama.model import Model
from speculation.drafter import MethodSpec
from speculation.heads.base import Head
from speculation.heads.file import HeadsKind, llama_format
from speculation.heads.load import load_heads, require_no_heads
from speculation.methods import METHODS, MethodTable
from tests.support.tiny_gguf import finish_writer, started_writer


def test_a_method_can_bring_a_kind_of_heads_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    finish_writer(started_writer(path, "my-heads", 512, 32, 1, None), path)
    own, contained = Head(), Head()
    mine = llama_format("mine", "my-heads", lambda gguf, model: own)
    inside = HeadsKind("inside", lambda gguf: False, mine.load, lambda model: contained)
    spec = MethodSpec("mine", "Mine", lambda params, resources: None, heads=(mine, inside))
    kinds = MethodTable([spec]).heads_kinds()
    with Model(tiny_model) as model:
        with pytest.raises(HeadsError):
            load_heads([path], model, METHODS.heads_kinds())
        assert load_heads([path], model, kinds) == {"mine": own, "inside": contained}
    require_no_heads(path, METHODS.heads_kinds())
    with pytest.raises(HeadsError, match="contains drafting heads, not a model"):
        require_no_heads(path, kinds)
