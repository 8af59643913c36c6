"""Bigram tables: which one is used, damaged files, and how one is made."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from batching.llama.model import Model
from batching.tree import Floats
from speculation.bigrams import N_NEXT, BigramTable, cached_file, load_bigrams
from speculation.bigrams import __main__ as tool
from speculation.bigrams.__main__ import main
from speculation.engine import Engine
from tests.support.tiny_gguf import write_tiny_gguf

EXACT = ContextParams(n_ctx=128, kv_type="f32", flash_attn="off", n_threads=1)


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a folder of its own, and an empty cache."""
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    return write_tiny_gguf(folder / "model.gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat saw a dog", encoding="utf-8")
    return path


def table_with(successor: int, n_vocab: int) -> BigramTable:
    """A table in which ``successor`` follows token 5."""
    return BigramTable.from_sums({5: {successor: 1.0}}, {5: 1}, n_vocab)


def put(path: Path, table: BigramTable, n_vocab: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path, n_vocab)


def test_a_bigram_table_keeps_the_likeliest_tokens_and_can_be_saved(tmp_path: Path) -> None:
    logits: Floats = np.full(20, -5.0, np.float32)
    logits[[3, 7, 11]] = [2.0, 3.0, 1.0]
    table = BigramTable()
    assert table.of(4) == []
    table.learn(4, logits)
    assert [token for token, _ in table.of(4)][:3] == [7, 3, 11]
    assert sum(p for _, p in table.of(4)) == pytest.approx(1.0)
    table.save(tmp_path / "table.npz", 20)
    again = BigramTable.load(tmp_path / "table.npz", 20)
    assert [token for token, _ in again.of(4)] == [token for token, _ in table.of(4)]
    assert again.of(4)[0][1] == pytest.approx(table.of(4)[0][1], abs=0.003)
    assert again.of(5) == []
    with pytest.raises(InvalidParameter, match="the model has 21; rebuild it"):
        BigramTable.load(tmp_path / "table.npz", 21)
    (tmp_path / "table.npz").write_bytes(b"nonsense")
    with pytest.raises(InvalidParameter, match="is not a bigram table"):
        BigramTable.load(tmp_path / "table.npz", 20)


def test_the_users_own_table_takes_precedence_over_the_one_beside_the_model(
    model_file: Path,
) -> None:
    beside = model_file.with_suffix(".bigrams.npz")
    with Model(model_file) as model:
        put(beside, table_with(7, model.n_vocab), model.n_vocab)
        assert load_bigrams(model).of(5) == [(7, 1.0)]
        put(cached_file(model), table_with(9, model.n_vocab), model.n_vocab)
        assert load_bigrams(model).of(5) == [(9, 1.0)]


def test_a_table_made_without_out_is_found_and_used_and_out_is_the_exact_file_name(
    model_file: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--model", str(model_file), "--text", str(text)]
    with Model(model_file) as model:
        put(model_file.with_suffix(".bigrams.npz"), BigramTable(), model.n_vocab)
        assert main(command) == 0
        assert capsys.readouterr().out.startswith(f"{cached_file(model)}: ")
        cat = model.tokenize("the cat")[-1]
        probs = [p for _, p in load_bigrams(model).of(cat)]
    assert len(probs) == N_NEXT == 8
    assert probs == sorted(probs, reverse=True)
    assert 0 < sum(probs) <= 1.02
    out = tmp_path / "foo.txt"
    assert main([*command, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: {out.stat().st_size:,} bytes\n"
    assert not (tmp_path / "foo.txt.npz").exists()
    assert main(["--model", str(model_file), "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0, 0.5, 0.95])
def test_a_truncated_table_is_ignored_with_a_warning(
    model_file: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    with Model(model_file) as model:
        own, n_vocab = cached_file(model), model.n_vocab
        put(own, table_with(9, n_vocab), n_vocab)
        content = own.read_bytes()
        own.write_bytes(content[: int(share * len(content))])
        put(model_file.with_suffix(".bigrams.npz"), table_with(7, n_vocab), n_vocab)
        with caplog.at_level(logging.WARNING):
            assert load_bigrams(model).of(5) == [(7, 1.0)]
        assert f"{own} is not a bigram table" in caplog.text
        assert "ignoring the file" in caplog.text
    with Engine.load(model_file, EXACT) as engine:
        ours = engine.generate("the cat", method="recycling", max_tokens=8).run()
        plain = engine.generate("the cat", method="ar", max_tokens=8).run()
        assert ours.token_ids == plain.token_ids


def test_a_file_of_another_kind_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file, array = tmp_path / "table.npz", io.BytesIO()
    np.save(array, np.zeros(3))
    table_with(7, 20).save(file, 20)
    whole = file.read_bytes()
    damaged = whole[:90] + bytes(20) + whole[110:]
    flags = whole.index(b"PK\x01\x02") + 8  # in the archive's directory
    encrypted = whole[:flags] + b"\x01" + whole[flags + 1 :]
    others = []
    for tokens in (np.zeros((20, 8)), np.zeros((20, 8), "i4"), np.array(5, "u2")):
        np.savez(other := io.BytesIO(), tokens=tokens, probs=np.ones((20, 8), np.uint8))
        others.append(other.getvalue())
    for content in (b"", b"nonsense", b"PK\x03\x04", array.getvalue(), damaged, encrypted, *others):
        file.write_bytes(content)
        with pytest.raises(InvalidParameter, match=r"\.npz is not a bigram table: .*rebuild it"):
            BigramTable.load(file, 20)
    table_with(20, 20).save(file, 20)
    with pytest.raises(InvalidParameter, match="has unknown tokens; rebuild it"):
        BigramTable.load(file, 20)


def test_a_failed_write_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.npz"
    table_with(7, 20).save(file, 20)

    def full(file: io.BufferedWriter, **arrays: object) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        table_with(9, 20).save(file, 20)
    assert BigramTable.load(file, 20).of(5) == [(7, 1.0)]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--text", "TEXT", "--out", "FOLDER"], "FOLDER: it is a folder; give a file"),
        (["--text", "TEXT", "--out", "FOLDER/none/x.npz"], "x.npz: no such folder; give a file"),
        (["--text", "TEXT", "--out", "TEXT"], "TEXT: it is one of the input files"),
        (["--text", "EMPTY"], "there is no text in EMPTY; give files that contain text"),
        (["--text", "TEXT", "--max-tokens", "0"], "--max-tokens is 0; give 1 or more"),
        (["--text", "TEXT", "--max-tokens", "-5"], "--max-tokens is -5; give 1 or more"),
        (["--text", "BINARY"], "BINARY is not UTF-8 text (invalid start byte at byte 1)"),
    ],
)
def test_options_that_give_no_table_are_refused_before_the_model_is_loaded(
    text: Path, tmp_path: Path, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"TEXT": text, "EMPTY": tmp_path / "empty.txt", "BINARY": tmp_path / "b.bin"}
    paths["FOLDER"] = tmp_path / "folder"
    paths["FOLDER"].mkdir()
    paths["EMPTY"].write_text(" \n", encoding="utf-8")
    paths["BINARY"].write_bytes(b"a\xff\x00")

    def filled(text: str) -> str:
        for name, path in paths.items():
            text = text.replace(name, str(path))
        return text

    command = ["--model", str(tmp_path / "none.gguf"), *map(filled, flags)]
    assert main(command) == 2
    assert filled(reason) in capsys.readouterr().err
    assert list(paths["FOLDER"].iterdir()) == []


def test_ctrl_c_ends_with_its_exit_code_and_writes_nothing(
    model_file: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: object) -> BigramTable:
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "collect", interrupted)
    out = tmp_path / "table.npz"
    assert main(["--model", str(model_file), "--text", str(text), "--out", str(out)]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert not out.exists()


def test_the_token_limit_counts_all_texts_together(model_file: Path) -> None:
    with Model(model_file) as model:
        texts = ["the cat saw a dog"] * 3
        one = model.tokenize(texts[0], parse_special=True)
        assert len(one) > 4
        assert list(tool._sequences(model, texts, len(one) - 2, 2 * len(one) - 1)) == [
            one[:-2], one[-2:], one[:-2], one[-2:-1]
        ]  # fmt: skip
