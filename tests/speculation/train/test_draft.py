"""Training a draft model: its network is llama.cpp's, and its drafts are accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.llama.weights import Weights
from batching.rows import text_rows
from speculation.engine import Engine
from speculation.heads.file import HeadsInfo
from speculation.train.params import DraftTraining
from tests.support.exact import EXACT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train


def test_the_trained_network_is_the_one_that_llama_cpp_runs(
    tiny_model: Path, tmp_path: Path
) -> None:
    from speculation.train.draft import write_draft
    from speculation.train.layer import DraftModule
    from speculation.train.training import Target

    with Engine.load(tiny_model, EXACT) as engine:
        info = HeadsInfo.of_target("draft", engine.model)
    n_vocab = info.n_vocab
    params = DraftTraining(width=64, layers=2, ff=96, kind="f32")
    generator = torch.Generator().manual_seed(0)
    drafted = np.arange(5, n_vocab, 2)
    module = DraftModule(
        params.shape, 2, torch.randn(n_vocab, 64, generator=generator), drafted.astype(np.int32)
    )
    with torch.no_grad():
        for parameter in module.parameters():  # what begins as 0 must count, too
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    path = tmp_path / "draft.gguf"
    target = Target(info, Weights(tiny_model), np.zeros((0, 0), np.float32))
    write_draft(path, params, module.tensors(), target)
    tokens = [1, 7, 30, 12, 7, 99, 4]
    with torch.inference_mode():
        ours = module.output(module(torch.tensor([tokens]))[0])
    with Engine.load(path, EXACT) as engine:
        rows = text_rows(tokens, 0, [True] * len(tokens))
        output = engine.context.decode(rows)
        for row in range(len(tokens)):
            theirs = output.logits(row)
            np.testing.assert_allclose(theirs[drafted], ours[row], atol=1e-4)
            assert not np.delete(theirs, drafted).any()


def test_tokens_that_are_never_drafted_count_in_the_loss() -> None:
    from speculation.train.training import distribution_loss

    generator = torch.Generator().manual_seed(0)
    ours, wanted = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    output, matrix = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
    all_rows = torch.cat([output, torch.zeros(10, 4)])
    p = torch.cat([(wanted @ matrix.T).softmax(dim=1), torch.zeros(5, 10)], dim=1)
    whole = torch.nn.functional.cross_entropy(ours @ all_rows.T, p)
    torch.testing.assert_close(distribution_loss(ours, output, wanted, matrix, 10), whole)


def test_sizes_that_llama_cpp_cannot_store_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="width is 100; give a multiple of 64"):
        DraftTraining(width=100)
    with pytest.raises(InvalidParameter, match="ff is 100; give a multiple of 32"):
        DraftTraining(ff=100)
