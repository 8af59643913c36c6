"""Training heads: data, evaluation, output files, and that trained heads draft well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import InvalidParameter
from speculation.engine import Engine
from speculation.train.params import EagleTraining, MedusaTraining, ReDrafterTraining
from speculation.train.ranks import N_RANKS, accuracy_of, chain_accuracy, ranks_of
from speculation.train.sequences import Sequences
from speculation.train.texts import Sample
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.train_data import collected, lines, train


@pytest.mark.train
def test_heads_learn_from_the_targets_replies(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    # The target generated tokens 3 to 6 of the first sequence.
    samples = [Sample(list(range(7)), [(3, 7)]), Sample([7, 8, 9], [])]
    found = collected(tmp_path, samples, np.arange(10)[:, None], range(10, 20))
    data = Sequences(found, "cpu", np.zeros((10, 1), np.float32), found.hidden)
    batch = data.batch([0, 1])
    # A sequence's first token has no state before it. From the state before token 2, the reply's
    # first token is predicted; the last position predicts its last one.
    assert batch.places().tolist() == [1, 2, 3, 4]
    assert batch.before.flatten()[batch.places()].tolist() == [1, 2, 3, 4]
    assert batch.choices.flatten()[batch.places()].tolist() == [12, 13, 14, 15]
    assert batch.continues().nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(batch.places(skip=2), batch.places()[1:])


def test_sequences_with_nothing_to_learn_are_not_held_out(tmp_path: Path) -> None:
    reply = Sample([5, 6, 7, 8], [(2, 4)])
    # Prompts alone, a reply of one token, and prompts that had no room for a reply.
    nothing = [Sample([5, 6, 7], []), Sample([5, 6], [(1, 2)]), Sample([], [])]
    found = collected(tmp_path, [reply, *nothing] * 3)
    data = Sequences(found, "cpu", np.zeros((9, 4), np.float32), found.hidden)
    assert data.split(0.05) == ([0, 4], [8])
    assert data.split(0.5) == ([0], [4, 8])


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "eagle"])
@pytest.mark.train
def test_heads_are_evaluated_even_if_the_last_prompts_had_no_room(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    prompts = ["the cat", "a dog", "the cat saw " * 40]
    data = lines(tmp_path / "p.jsonl", *[{"prompt": prompt} for prompt in prompts])
    flags = ("--epochs", 1, "--generate", 12, "--ctx", 64)
    assert train(kind, tiny_model, data, tmp_path / "h.gguf", *flags) == 0
    measured = re.search(r"measured on (\d+) held-out states", capsys.readouterr().out)
    assert measured is not None
    assert int(measured[1]) > 0


def test_accuracy_counts_ranks() -> None:
    ranks = np.array([[-1, -1], [0, 2], [1, 0], [0, N_RANKS], [0, 0], [1, -1], [-1, -1]])
    np.testing.assert_allclose(accuracy_of(ranks)[:, :3], [[0.6, 0.4, 0], [0.5, 0, 0.25]])


def test_a_chain_is_evaluated_where_all_earlier_first_choices_were_accepted() -> None:
    ranks = np.array([[0, 0, 3], [0, 1, 0], [2, 0, 0], [0, 0, -1], [0, -1, -1]])
    accuracy = chain_accuracy(ranks)
    # Of five chains four start correctly; of the three with a second token, two are correct.
    np.testing.assert_allclose(accuracy[0, :4], [0.8, 0, 0.2, 0])
    np.testing.assert_allclose(accuracy[1, :4], [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(accuracy[2, :4], [0, 0, 0, 1])


@pytest.mark.train
def test_a_token_that_is_not_drafted_has_the_last_rank() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    wanted = np.array([20, 7, 15])
    tokens = np.array([7, 15, 20], np.int32)
    assert ranks_of(logits, wanted, tokens).tolist() == [1, 2, 0]
    assert ranks_of(logits, np.array([20, 8, 90]), tokens).tolist() == [1, N_RANKS, N_RANKS]
    assert ranks_of(logits, np.array([0, 1, 2])).tolist() == [2, 0, 1]


@pytest.mark.parametrize("training", [MedusaTraining, ReDrafterTraining, EagleTraining])
def test_a_negative_seed_is_refused(training: type) -> None:
    with pytest.raises(InvalidParameter, match="seed is -1; give 0 to 4294967295"):
        training(seed=-1)


# The whole training


PROMPTS = ("the cat", "a dog", "and the", "saw a cat", "the dog and", "a cat")
CHAIN = "eagle-2:top_k=1,depth=3,nodes=3"
MEDUSA = "medusa --heads 2 --epochs 150"
EAGLE = "eagle --epochs 60 --rate 0.005 --kind f32"


@pytest.mark.parametrize(
    ("flags", "methods"),
    [
        (MEDUSA, {"medusa": 1.3}),
        (f"{MEDUSA} --vocab 40 --blocks 2", {"medusa": 1.3}),
        ("redrafter --epochs 150", {"redrafter": 1.3}),
        # A chain of three gives less than a tree.
        (EAGLE, {"eagle-1": 1.5, "eagle-2": 1.5, CHAIN: 1.3}),
        (f"{EAGLE} --eagle3 --layers 1 2 3", {"eagle-3": 1.4}),
        (f"{EAGLE} --eagle3 --layers 1 2 3 --vocab 200", {"eagle-3": 1.4}),
    ],
)
@pytest.mark.train
def test_drafts_of_what_was_trained_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, methods: dict[str, float]
) -> None:
    """Without drafts a step gives 1.0 tokens, with those of an untrained head up to 1.04."""
    target = write_tiny_gguf(tmp_path / "target.gguf", n_layer=4 if "eagle3" in flags else 2)
    out = tmp_path / "out.gguf"
    kind, *more = flags.split()
    data = lines(tmp_path / "p.jsonl", *({"prompt": prompt} for prompt in PROMPTS))
    common = ("--generate", 60, "--batch", 2, "--rate", 0.01, "--device", "cpu")
    assert train(kind, target, data, out, *common, *more) == 0
    printed = capsys.readouterr().out
    for shown in ("accuracy of each choice", "tokens per step", f"{out}: "):
        assert shown in printed
    with Engine.load(target, EXACT, heads=out) as engine:
        text = f"<s><|user|>{PROMPTS[0]}<|end|><|assistant|>"
        prompt = engine.model.tokenize(text, add_special=False, parse_special=True)
        plain = engine.generate(prompt, method="ar", max_tokens=50).run()
        for method, least in methods.items():
            ours = engine.generate(prompt, method=method, max_tokens=50).run()
            assert ours.token_ids == plain.token_ids
            assert ours.stats.tokens_per_step > least, method


@pytest.mark.train
def test_missing_requirements_are_reported_in_one_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "a.txt", tmp_path / "h.gguf"
    data.write_text("", encoding="utf-8")

    def refused(*flags: object, out: Path = out) -> str:
        assert train("medusa", tiny_model, data, out, *flags) == 2
        return capsys.readouterr().err

    with pytest.MonkeyPatch.context() as without:
        without.setattr("speculation.train.__main__.find_spec", lambda name: None)
        assert "python -m pip install 'torch>=2.6'" in refused()
    assert "no such folder" in refused(out=tmp_path / "none" / "h.gguf")
    assert "heads is 20; give 1 to 8" in refused("--heads", 20)
    assert "the data has no token to train on" in refused("--ctx", 64)
    data.write_text("the cat saw a dog", encoding="utf-8")
    one = refused("--ctx", 64, "--work", tmp_path / "other")
    assert "one must be held out; give more" in one


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "eagle"])
@pytest.mark.train
def test_options_that_cannot_work_are_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, data = tmp_path / "folder", tmp_path / "none.txt"
    folder.mkdir()
    for flags, reason in (
        (["--out", data], f"cannot write {data}: it is one of the input files"),
        (["--out", folder], f"cannot write {folder}: it is a folder"),
        (["--seed", -1], "seed is -1; give 0 to 4294967295"),
        (["--generate", -5], "--generate is -5; give 0 or more"),
        (["--max-tokens", 0], "--max-tokens is 0; give 1 or more"),
        (["--device", "foo"], "--device is 'foo'; PyTorch has cpu"),
        (["--device", "cuda:99"], "--device is 'cuda:99'; PyTorch has cpu"),
    ):
        assert train(kind, tmp_path / "none.gguf", data, tmp_path / "h.gguf", *flags) == 2
        assert capsys.readouterr().err.startswith(f"error: {reason}")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.train
def test_the_target_is_not_overwritten(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines(tmp_path / "p.jsonl", {"prompt": "the cat"})
    assert train("medusa", tiny_model, data, tiny_model) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write {tiny_model}: it is one of the input files")


@pytest.mark.train
def test_a_failed_command_can_be_corrected_in_the_same_folder(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines(tmp_path / "p.jsonl", {"prompt": "the cat"}, {"prompt": "a dog"})
    files = ("medusa", tiny_model, data, tmp_path / "h.gguf")
    flags = ["--epochs", 1, "--heads", 1]
    assert train(*files, *flags) == 2
    assert "add --generate N" in capsys.readouterr().err
    assert train(*files, *flags, "--generate", 256, "--ctx", 256) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: none of the 2 prompts leaves room for --generate 256 in a con")
    flags += ["--generate", 8, "--ctx", 128]
    assert train(*files, *flags) == 0
    lines(data, {"prompt": "the dog"}, {"prompt": "a cat"})  # the same number of bytes
    assert train(*files, *flags) == 2
    assert "has states collected with other settings: data was" in capsys.readouterr().err
    (tmp_path / "h.gguf.states" / "run.json").write_text("{", encoding="utf-8")
    assert train(*files, *flags) == 2
    assert "run.json is damaged" in capsys.readouterr().err


@pytest.mark.train
def test_the_error_for_too_little_memory_suggests_a_smaller_batch(
    tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "p.jsonl", {"prompt": "the cat"}, {"prompt": "a dog"})

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99")

    monkeypatch.setattr("speculation.train.training.train", out_of_memory)
    flags = ("--generate", 8, "--ctx", 128)
    assert train("medusa", tiny_model, data, tmp_path / "h.gguf", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: out of memory in a training step; lower --batch or give")


@pytest.mark.train
def test_a_context_no_larger_than_a_batch_can_be_collected_from(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = lines(tmp_path / "p.jsonl", {"prompt": "the cat saw"}, {"prompt": "a dog"})
    flags = ("--epochs", 1, "--heads", 1, "--generate", 64, "--ctx", 64)
    assert train("medusa", tiny_model, data, tmp_path / "h.gguf", *flags) == 0
