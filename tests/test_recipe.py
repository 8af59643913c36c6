"""The recipe of the bundled model: what of it is worth a test without training."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from models.recipe.grow import deepen  # noqa: E402
from models.recipe.model import Decoder, Shape  # noqa: E402
from models.recipe.train import Schedule  # noqa: E402


def trained() -> Decoder:
    """A small decoder whose every weight does something."""
    torch.manual_seed(5)
    decoder = Decoder(Shape(vocab=64, dim=32, layers=2, heads=2, hidden=64, context=32))
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    return decoder.eval()


def test_a_decoder_made_deeper_says_what_it_said() -> None:
    decoder = trained()
    deeper = deepen(decoder)
    tokens = torch.randint(0, 64, (3, 20))
    assert deeper.shape.layers == 4
    torch.testing.assert_close(deeper(tokens), decoder(tokens))


def test_the_new_blocks_of_a_deeper_decoder_learn_from_the_first_step() -> None:
    deeper = deepen(trained())
    tokens = torch.randint(0, 64, (3, 21))
    deeper.loss(tokens, torch.ones(3, 20)).backward()
    for block in deeper.blocks[1::2]:
        assert block.feed_forward.down.weight.grad.abs().max() > 0
        assert block.attention.out.weight.grad.abs().max() > 0


def test_the_learning_rate_falls_to_zero_over_its_share_of_the_run() -> None:
    schedule = Schedule(warmup=40, decay_share=0.6)
    assert schedule.end(0, 520) == 1300
    assert [schedule.factor(step, 0, 520) for step in (0, 39, 519, 520, 910, 1300)] == [
        1 / 40, 1.0, 1.0, 1.0, 0.5, 0.0
    ]  # fmt: skip
