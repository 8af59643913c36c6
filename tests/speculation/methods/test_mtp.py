"""Multi-token prediction (MTP): a model's own layer drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.cache import SequenceCache
from batching.errors import InvalidParameter, ModelError
from batching.gguf.mtp import MtpLayers, find_mtp_layers
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context
from batching.llama.model import Model
from batching.together import run
from speculation.drafting.head_context import HeadContext
from speculation.engine import Engine
from tests.support.exact import EXACT, PROMPT, endless, same_texts
from tests.support.fake_target import prefill
from tests.support.head_checks import load_heads
from tests.support.reference import rms_norm
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_heads import (
    attached,
    hybrid,
    mtp,
    write_assistant_gguf,
    write_gemma_gguf,
    write_mtp_gguf,
    write_mtp_gguf_with_kv,
    write_mtp_header,
)


@pytest.fixture(scope="module", params=[hybrid, mtp, attached])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    target, heads, _ = request.param(tmp_path_factory.mktemp("models"))
    with Engine.load(target, EXACT, heads=heads) as made:
        yield made


def test_most_drafts_of_an_accurate_layer_are_accepted(engine: Engine) -> None:
    stats = engine.generate(PROMPT, method="mtp", max_tokens=60).run().stats
    assert stats.n_accepted > 0.9 * stats.n_drafted > 20
    unsure = engine.generate(PROMPT, method="mtp:depth=3,p_min=0", max_tokens=60).run().stats
    assert unsure.n_drafted > stats.n_drafted
    assert max(unsure.rows_histogram) == 4  # three drafts and their root


def test_a_wide_tree_is_decoded_if_the_cache_can_drop_branches(engine: Engine) -> None:
    wide = same_texts(engine, PROMPT, "mtp:p_min=0,top_k=12,nodes=100", max_tokens=30)[1]
    is_hybrid = engine.context.n_rewind == 8
    assert (max(wide.stats.rows_histogram) > 60) == (not is_hybrid)


def test_the_layer_reads_the_state_before_each_token(tmp_path: Path) -> None:
    path = write_mtp_gguf(tmp_path / "mtp.gguf", influence=0.5, of_state=0.7)
    file = GGUFFile(path)
    w = {name: file.tensor(name) for name in file.tensors if "token" in name or "nextn" in name}
    output = file.output_matrix()
    text = [5, 270, 271, 272, 280, 281, 282, 270]
    ones = np.ones(32, np.float32)
    with Model(path, mtp=True) as model, Context(model, EXACT) as context:
        (head,) = load_heads([], model).values()
        head.start(EXACT, context)
        levels = HeadContext(head)
        levels.window, levels.depth = 64, 4
        cache = SequenceCache(context)
        prefill(cache, text[:-1], reader=levels)
        found = run(levels.root(text))
        assert found is not None
        logits = found[0].logits(found[1]).copy()
        head.close()
        context.want_hidden(True)
        cache.truncate(0)
        state = run(cache.extend(text[:-1])).hidden(len(text) - 2)
        token = w["token_embd.weight"][text[-1]]
        both = np.concatenate([rms_norm(token, ones), rms_norm(state, ones)])
        expected = output @ rms_norm(w["blk.3.nextn.eh_proj.weight"] @ both, ones)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_reply_is_not_decoded_again_for_the_layer(engine: Engine) -> None:
    text = [1, *range(20, 140)]
    for method in ("mtp", "ar", "mtp"):
        reply = engine.generate(text, method=method, sampling=endless(engine), max_tokens=90).run()
        text = [*text, *reply.token_ids]
        n_reused = engine.generate([*text, 30], method="mtp", max_tokens=1).run().stats.n_reused
        is_hybrid = engine.context.n_rewind == 8
        assert n_reused == len(text) - 1 if is_hybrid else n_reused >= len(text) - 65


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (write_mtp_gguf, {"mtp": False}),
        (partial(write_mtp_gguf_with_kv, without=True), {}),  # its metadata declare a layer
        (partial(write_mtp_gguf, n_mtp=2), {}),  # llama.cpp runs only one for Qwen 3.5
    ],
)
def test_a_model_without_mtp_layers_that_can_run_works_like_any_other(
    tmp_path: Path, write: Callable[[Path], Path], settings: dict[str, Any]
) -> None:
    with Engine.load(write(tmp_path / "m.gguf"), EXACT, **settings) as engine:
        assert (engine.model.n_mtp, engine.resources.seat.heads) == (0, {})
        assert len(engine.generate(PROMPT, max_tokens=5).run().token_ids) == 5
        with pytest.raises(InvalidParameter, match="method mtp needs a model with multi-token"):
            engine.generate(PROMPT, method="mtp").run()


def test_a_layer_in_a_separate_file_drafts_for_its_model(tmp_path: Path) -> None:
    path = write_mtp_gguf(tmp_path / "mtp.gguf")
    alone = write_mtp_gguf(tmp_path / "alone.gguf", alone=True)
    with Engine.load(path, EXACT) as engine:
        expected = engine.generate(PROMPT, method="mtp", max_tokens=40).run()
    with Engine.load(path, EXACT, mtp=False, heads=alone) as engine:
        found = engine.generate(PROMPT, method="mtp", max_tokens=40).run()
    assert found.token_ids == expected.token_ids
    assert found.stats.n_accepted > 15


def test_a_layer_alone_or_an_assistant_is_not_a_model_and_drafts_only_for_its_target(
    tmp_path: Path,
) -> None:
    qwen, target = write_mtp_gguf(tmp_path / "mtp.gguf"), write_gemma_gguf(tmp_path / "gemma.gguf")
    alone = write_mtp_gguf(tmp_path / "alone.gguf", alone=True)
    several = write_mtp_gguf(tmp_path / "several.gguf", alone=True, n_mtp=2)
    assistant = write_assistant_gguf(tmp_path / "assistant.gguf", target)
    no_model = "contains drafting heads, not a model"
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (alone, {"mtp": False}, f"alone.gguf {no_model}"),
        (alone, {"mtp": True}, f"alone.gguf {no_model}"),
        (qwen, {"draft_model": alone}, f"alone.gguf {no_model}"),
        (several, {}, f"several.gguf {no_model}"),
        (qwen, {"heads": several}, r"several\.gguf contains .* cannot run"),
        (assistant, {}, f"assistant.gguf {no_model}"),
        (target, {"draft_model": assistant}, f"assistant.gguf {no_model}"),
        (
            qwen,
            {"heads": assistant},
            "of a gemma4 model of width 32, but 'tiny' has architecture qwen35 and width 32",
        ),
        (
            write_mtp_gguf_with_kv(tmp_path / "other.gguf"),
            {"heads": alone},
            "for a model with architecture qwen35, 3 layers, width 32 and 305 tokens, but 'tiny' "
            "has architecture glm4moe, 3 layers",
        ),
    ]
    for model, settings, reason in refused:
        with pytest.raises(ModelError, match=reason):
            Engine.load(model, EXACT, **settings)


def test_an_assistant_keeps_drafting_after_the_context_is_recreated(tmp_path: Path) -> None:
    target = write_gemma_gguf(tmp_path / "gemma.gguf")
    heads = write_assistant_gguf(tmp_path / "assistant.gguf", target, of_state=0.02)
    with Engine.load(target, EXACT, heads=heads) as engine:
        n_seq = engine.context.n_seq_max
        wide = "mtp:p_min=0,top_k=12,nodes=100"
        found = same_texts(engine, PROMPT, "mtp:p_min=0", wide, "mtp:p_min=0", max_tokens=60)
        assert engine.context.n_seq_max > n_seq
    assert found[1].stats.n_accepted == found[3].stats.n_accepted > 20


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (write_mtp_gguf, MtpLayers(1, mtp_only=False)),
        (partial(write_mtp_gguf, alone=True), MtpLayers(1, mtp_only=True)),
        (partial(write_mtp_gguf_with_kv, without=True), MtpLayers(0, mtp_only=False)),
        (write_tiny_gguf, MtpLayers(0, mtp_only=False)),
        # Without a graph in llama.cpp, or without a tensor that it needs
        (partial(write_mtp_header, architecture="glm5-next"), MtpLayers(0, mtp_only=False)),
        (partial(write_mtp_header, architecture="nemotron_h"), MtpLayers(0, mtp_only=False)),
        (partial(write_mtp_header, architecture="mimo2"), MtpLayers(0, mtp_only=False)),
        (partial(write_mtp_header, architecture="nemotron_h_moe"), MtpLayers(1, mtp_only=False)),
    ],
)
def test_layers_that_llama_cpp_has_a_graph_for_are_found(
    tmp_path: Path, write: Callable[[Path], Path], found: MtpLayers
) -> None:
    assert find_mtp_layers(write(tmp_path / "m.gguf")) == found


def test_the_layers_of_a_split_model_are_found_in_all_its_files(tmp_path: Path) -> None:
    write_mtp_gguf(tmp_path / "split.gguf", tensors_per_file=20)
    first, *others = sorted(tmp_path.glob("split-*.gguf"))
    assert find_mtp_layers(first) == MtpLayers(1, mtp_only=False)
    with Engine.load(first, EXACT) as engine:
        assert engine.generate(PROMPT, method="mtp", max_tokens=40).run().stats.n_accepted > 15
    others[-1].unlink()
    with pytest.raises(ModelError):
        find_mtp_layers(first)
