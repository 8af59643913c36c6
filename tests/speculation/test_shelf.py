"""Idle texts in main memory and on disk, and what a restart finds of them."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from speculation.engine import Engine
from speculation.parallel import ParallelEngine
from speculation.shelf import Shelf
from speculation.text_files import TextFiles, identity_of, usual_flash_attn
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf

MODEL, OTHER = "a" * 16, "b" * 16
ONE, TWO = list(range(100)), list(range(1000, 1100))  # two texts
STATE = bytes(range(200))


def kept(folder: Path, model: str = MODEL, max_bytes: int = 10**6) -> Shelf:
    """A shelf with room for one text in main memory."""
    return Shelf(max_bytes=300, files=TextFiles(folder, model, max_bytes))


def found(shelf: Shelf, prompt: list[int], more_than: int = 0) -> tuple[bytes, int]:
    text, n = shelf.best(prompt, more_than)
    return b"" if text is None else bytes(text.state), n


def write(folder: Path, tokens: list[int], model: str = MODEL) -> Path:
    before = {*folder.glob("*")}
    shelf = kept(folder, model)
    shelf.put(tokens, lambda: STATE)
    shelf.close()
    (path,) = {*folder.glob("*")} - before
    return path


def test_a_text_without_room_goes_to_disk_and_is_there_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "texts"
    shelf = kept(folder)
    shelf.put(ONE, lambda: STATE)
    shelf.put(TWO, lambda: STATE[::-1])
    for _ in range(2):  # while it is written, and afterwards
        assert found(shelf, [*ONE, 5]) == (STATE, 100)
        assert found(shelf, TWO[:50]) == (STATE[::-1], 50)
        assert shelf.files is not None
        shelf.files.wait()
    shelf.close()
    files = [*folder.glob("*")]
    assert len(files) == 2
    if sys.platform != "win32":
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *files)] == [
            0o700,
            0o600,
            0o600,
        ]
    assert found(kept(folder), [*ONE, 5]) == (STATE, 100)
    assert found(kept(folder, OTHER), [*ONE, 5]) == (b"", 0)  # another model's are left alone
    assert {*folder.glob("*")} == {*files}


def test_no_text_is_copied_once_a_copy_took_longer_than_reading(tmp_path: Path) -> None:
    copied: list[list[int]] = []

    def keep(shelf: Shelf, text: list[int]) -> None:
        def copy() -> bytes:
            copied.append(text)
            return STATE

        shelf.put(text, copy)

    quick, slow = Shelf(read_seconds=10.0), Shelf(read_seconds=0.0)
    for shelf in (quick, slow):
        assert shelf.pays  # nothing is known yet
        keep(shelf, ONE)
        keep(shelf, TWO)
    assert (quick.pays, slow.pays) == (True, False)
    assert copied == [ONE, TWO, ONE]
    assert found(slow, ONE) == (STATE, 100)
    asked_for = Shelf(files=TextFiles(tmp_path, MODEL, 10**6), read_seconds=0.0)
    keep(asked_for, ONE)
    keep(asked_for, TWO)
    assert copied[3:] == [ONE, TWO]


def test_a_text_is_restored_only_if_that_is_quicker(tmp_path: Path) -> None:
    write(tmp_path, ONE)
    shelf = kept(tmp_path)
    assert found(shelf, ONE[:41])[1] == 0  # a text of 100 tokens costs as much as reading 10
    assert found(shelf, ONE[:42])[1] == 42
    assert found(shelf, ONE, more_than=90)[1] == 0  # they are in the cache
    text, _ = shelf.best(ONE[:60])
    assert text is not None
    shelf.use(text, whole=False)
    assert found(shelf, ONE[:32])[1] == 32  # it is in main memory now


def test_a_text_replaces_those_it_continues(tmp_path: Path) -> None:
    old = write(tmp_path, ONE)
    new = write(tmp_path, [*ONE, 5])
    assert [*tmp_path.glob("*")] == [new] != [old]
    shelf = kept(tmp_path)
    shelf.put(ONE, lambda: STATE)  # the file has more
    shelf.close()
    assert [*tmp_path.glob("*")] == [new]


def test_the_texts_used_last_stay_within_the_limit(tmp_path: Path) -> None:
    paths = [write(tmp_path, [n, *ONE], model) for n, model in enumerate((MODEL, OTHER, MODEL))]
    for seconds, path in enumerate(paths):
        os.utime(path, (seconds, seconds))
    size = paths[0].stat().st_size
    shelf = kept(tmp_path, max_bytes=3 * size)
    assert found(shelf, [0, *ONE]) == (STATE, 101)
    shelf.put(TWO, lambda: STATE)
    shelf.close()  # the oldest goes, although it is another model's
    assert [path.exists() for path in paths] == [True, False, True]
    shelf = kept(tmp_path, max_bytes=2 * size)
    assert [path.exists() for path in paths] == [True, False, False]
    assert found(shelf, [2, *ONE])[1] == 0
    shelf.put([7, *ONE], lambda: bytes(2 * size))  # larger than all of it
    shelf.close()
    assert paths[0].exists() and len([*tmp_path.glob("*")]) == 2


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def empty(path: Path) -> None:
    path.write_bytes(b"")


def exchange(path: Path) -> None:
    folder = path.parent / "other"
    shutil.move(write(folder, ONE, OTHER), path)
    folder.rmdir()


@pytest.mark.parametrize(
    "damage", [shorten, change(26), change(60), change(-1), empty, exchange, Path.unlink]
)
@pytest.mark.parametrize("is_running", [False, True])
def test_a_damaged_or_foreign_file_is_ignored_and_removed(
    tmp_path: Path, damage: Callable[[Path], None], is_running: bool
) -> None:
    bad, good = (write(tmp_path, [*ONE[:n], 5]) for n in (80, 60))
    shelf = kept(tmp_path) if is_running else None
    damage(bad)
    assert found(shelf or kept(tmp_path), ONE) == (STATE, 60)
    assert [*tmp_path.glob("*")] == [good]


def test_a_folder_that_cannot_be_used_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameter, match="cannot keep texts in .*keep_texts"):
        kept(tmp_path / "file")
    with pytest.raises(InvalidParameter, match="keep_texts is -1; give 0 or more"):
        ParallelEngine.load(keep_texts=-1)


def test_a_full_disk_loses_the_text_but_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = kept(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    shelf.put(ONE, lambda: STATE)
    shelf.close()
    assert "full" in caplog.text
    assert shelf.files is not None and shelf.files.read(shelf.files.texts[0]) is None


def test_flash_attention_that_may_vary_is_as_for_the_last_text(
    tmp_path: Path, tiny_model: Path
) -> None:
    def usual(flash_attn: str) -> str:
        return usual_flash_attn(tmp_path, tiny_model, ContextParams(flash_attn=flash_attn))

    assert usual("auto") == "auto"
    for on, name in ((False, "off"), (True, "on")):
        path = write(tmp_path, ONE, identity_of(tiny_model, "f16", flash_attn=on))
        os.utime(path, (9 + on, 9 + on))
        assert [usual("auto"), usual("off")] == [name, "off"]


def test_a_restarted_engine_goes_on_with_a_text_on_disk(
    tmp_path: Path, tiny_model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.parallel.texts_folder", lambda: tmp_path)
    other = write_tiny_gguf(tmp_path / "other.gguf", n_layer=1)
    prompt = [7 + i % 90 for i in range(300)]

    def reply(model: Path, prompt: list[int], n_ctx: int = 512) -> tuple[list[int], int]:
        params = replace(EXACT, n_ctx=n_ctx)
        with ParallelEngine.load(model, params, parallel=2, keep_texts=10) as parallel:
            written = parallel.submit(prompt, method="ar", max_tokens=9).run()
        return written.token_ids, written.stats.n_reused

    begun, n_reused = reply(tiny_model, prompt)
    assert n_reused == 0
    turn = [*prompt, *begun, 5]
    alone = engine.generate(turn, method="ar", max_tokens=9).run().token_ids
    assert reply(tiny_model, turn) == (alone, 300 + 9 - 1)
    (path,) = tmp_path.glob("*.text")
    assert reply(other, turn)[1] == 0
    begin = turn[:100]
    short = engine.generate(begin, method="ar", max_tokens=9).run().token_ids
    assert reply(tiny_model, begin, n_ctx=256) == (short, 0)  # the text on disk does not fit
    change(-1)(path)
    assert reply(tiny_model, turn) == (alone, 100)  # that of the one before
    assert not path.exists()
