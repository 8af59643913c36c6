"""The recipe of the bundled model: the parts that can be tested without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import MODELS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

from tools.recipe.export import load_decoder, write_gguf  # noqa: E402
from tools.recipe.grow import deepen  # noqa: E402
from tools.recipe.model import Decoder, Shape  # noqa: E402
from tools.recipe.tokenizer import Tokenizer  # noqa: E402
from tools.recipe.train import CHECKPOINT, Run, Schedule, start, take_up  # noqa: E402

TOKENIZER = MODELS / "speculation-14m.tokenizer.model"


def trained() -> Decoder:
    """A small decoder in which every weight has an effect."""
    torch.manual_seed(5)
    decoder = Decoder(Shape(vocab=64, dim=32, layers=2, heads=2, hidden=64, context=32))
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    return decoder.eval()


def test_a_deepened_decoder_gives_the_same_logits() -> None:
    decoder = trained()
    deeper = deepen(decoder)
    tokens = torch.randint(0, 64, (3, 20))
    assert deeper.shape.layers == 4
    torch.testing.assert_close(deeper(tokens), decoder(tokens))


def test_the_new_blocks_of_a_deepened_decoder_learn_from_the_first_step() -> None:
    deeper = deepen(trained())
    tokens = torch.randint(0, 64, (3, 21))
    loss: Any = deeper.loss(tokens, torch.ones(3, 20))
    loss.backward()
    new_blocks: Any = deeper.blocks[1::2]
    for block in new_blocks:
        assert block.feed_forward.down.weight.grad.abs().max() > 0
        assert block.attention.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("head", [0, 48])
def test_a_decoder_loaded_from_its_gguf_gives_the_same_logits(tmp_path: Path, head: int) -> None:
    torch.manual_seed(3)
    decoder = Decoder(Shape(dim=64, layers=2, heads=2, head=head, hidden=96, context=64)).eval()
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    write_gguf(decoder, Tokenizer(TOKENIZER), tmp_path / "some.gguf", "f32")
    again = load_decoder(tmp_path / "some.gguf")
    tokens = torch.randint(0, 4096, (2, 20))
    assert again.shape.head_dim == decoder.shape.head_dim
    torch.testing.assert_close(again(tokens), decoder(tokens))


def started_run() -> Run:
    shape = Shape(vocab=64, dim=64, layers=2, heads=2, hidden=64, context=32)
    return start(shape, Schedule(), "cpu")


def test_a_checkpoint_is_not_overwritten_by_another_run(tmp_path: Path) -> None:
    run = started_run()
    take_up(run, tmp_path, resume=False)
    run.step = 7
    run.save(tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match="would be written over; give --resume"):
        take_up(started_run(), tmp_path, resume=False)
    resumed = started_run()
    take_up(resumed, tmp_path, resume=True)
    assert resumed.step == 7


def test_a_decay_that_would_never_start_is_refused(tmp_path: Path) -> None:
    run = started_run()
    run.step, run.decay_from = 1750, 1400
    run.save(tmp_path / CHECKPOINT)
    take_up(started_run(), tmp_path, resume=True, decay_at=1400)  # the decay has started
    take_up(started_run(), tmp_path, resume=False, extend=True, decay_at=1750)
    with pytest.raises(ValueError, match="--decay-at is 1400 and the run stands at step 1750"):
        take_up(started_run(), tmp_path, resume=False, extend=True, decay_at=1400)


def test_an_extended_run_does_not_inherit_the_previous_decay(tmp_path: Path) -> None:
    started_run().save(tmp_path / CHECKPOINT)
    (tmp_path / "decay").touch()
    take_up(started_run(), tmp_path, resume=True)
    assert (tmp_path / "decay").exists()
    take_up(started_run(), tmp_path, resume=False, extend=True)
    assert not (tmp_path / "decay").exists()


def test_the_learning_rate_decays_to_zero_over_its_share_of_the_run() -> None:
    schedule = Schedule(warmup=40, decay_share=0.6)
    assert schedule.end(0, 520) == 1300
    assert [schedule.factor(step, 0, 520) for step in (0, 39, 519, 520, 910, 1300)] == [
        1 / 40, 1.0, 1.0, 1.0, 0.5, 0.0
    ]  # fmt: skip
