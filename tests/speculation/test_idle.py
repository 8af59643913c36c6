"""Idle texts in main memory and on disk, and what a restart finds of them."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculation.engine import Engine
from speculation.idle.copies import IdleTexts
from speculation.idle.files import TextFiles
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf

MODEL, OTHER = "a" * 16, "b" * 16
ONE, TWO = list(range(100)), list(range(1000, 1100))  # two texts
STATE = bytes(range(200))


def kept(folder: Path, model: str = MODEL, max_bytes: int = 10**6) -> IdleTexts:
    """Idle texts, of which one has room in main memory."""
    return IdleTexts(max_bytes=300, files=TextFiles(folder, model, max_bytes))


def put(idle: IdleTexts, tokens: list[int], state: bytes = STATE, **more: Any) -> None:
    """Keep a text that is all prompt."""
    idle.put(tokens, len(tokens), lambda: bytearray(state), **more)


def found(idle: IdleTexts, prompt: list[int], more_than: int = 0) -> tuple[bytes, int]:
    text, n = idle.best(prompt, more_than)
    return b"" if text is None else bytes(text.states[-1][1]), n


def write(folder: Path, tokens: list[int], model: str = MODEL) -> Path:
    before = {*folder.glob("*")}
    idle = kept(folder, model)
    put(idle, tokens)
    idle.close()
    (path,) = {*folder.glob("*")} - before
    return path


def test_a_text_without_room_goes_to_disk_and_is_there_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "texts"
    idle = kept(folder)
    put(idle, ONE)
    put(idle, TWO, STATE[::-1])
    for _ in range(2):  # while it is written, and afterwards
        assert found(idle, [*ONE, 5]) == (STATE, 100)
        assert found(idle, TWO[:50]) == (STATE[::-1], 50)
        assert idle.files is not None
        idle.files.wait()
    idle.close()
    files = [*folder.glob("*")]
    assert len(files) == 2
    if sys.platform != "win32":
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *files)]
        assert modes == [0o700, 0o600, 0o600]
    assert found(kept(folder), [*ONE, 5]) == (STATE, 100)
    assert found(kept(folder, OTHER), [*ONE, 5]) == (b"", 0)  # another model's are left alone
    assert {*folder.glob("*")} == {*files}


def test_no_text_is_copied_once_a_copy_took_longer_than_reading_but_for_the_disk() -> None:
    copied: list[list[int]] = []

    def keep(idle: IdleTexts, text: list[int]) -> None:
        def copy() -> bytes:
            copied.append(text)
            return STATE

        idle.put(text, len(text), copy)

    quick, slow = IdleTexts(read_seconds=10.0), IdleTexts(read_seconds=0.0)
    for idle in (quick, slow):
        assert idle.pays  # nothing is known yet
        keep(idle, ONE)
        keep(idle, TWO)
    assert (quick.pays, slow.pays) == (True, False)
    assert copied == [ONE, TWO, ONE]
    assert found(slow, ONE) == (STATE, 100)
    put(slow, TWO, is_last=True)  # it may go to disk
    assert found(slow, TWO) == (STATE, 100)


def test_a_text_is_restored_only_if_that_is_quicker(tmp_path: Path) -> None:
    write(tmp_path, ONE)
    idle = kept(tmp_path)
    assert found(idle, ONE[:33])[1] == 0  # a text of 100 tokens costs as much as reading two
    assert found(idle, ONE[:34])[1] == 34
    assert found(idle, ONE, more_than=98)[1] == 0  # they are in the cache
    text, _ = idle.best(ONE[:60])
    assert text is not None
    idle.use(text, ONE[:60])
    assert found(idle, ONE[:32])[1] == 32  # it is in main memory now


def test_a_text_replaces_those_it_continues(tmp_path: Path) -> None:
    old = write(tmp_path, ONE)
    new = write(tmp_path, [*ONE, 5])
    assert [*tmp_path.glob("*")] == [new] != [old]
    idle = kept(tmp_path)
    put(idle, ONE)  # the file has more
    idle.close()
    assert [*tmp_path.glob("*")] == [new]


def test_a_text_replaces_one_of_which_it_drops_the_reply(tmp_path: Path) -> None:
    begun, turn = [*ONE, 5, 6, 7], [*ONE, 6, 7, 8]  # a template leaves out reasoning
    for folder, n_files in ((None, 0), (tmp_path, 1)):
        files = None if folder is None else TextFiles(folder, MODEL, 10**6)
        idle = IdleTexts(files=files)
        idle.put(begun, len(ONE), lambda: STATE)
        if folder is not None:  # both come from the disk
            idle.close()
            idle = IdleTexts(files=TextFiles(folder, MODEL, 10**6))
        restored, n = idle.best([*turn, 9])
        assert restored is not None and n == 100
        idle.use(restored, [*turn, 9])
        put(idle, turn)
        assert [text.tokens for text in idle._texts] == [tuple(turn)]
        idle.close()
        assert len([*tmp_path.glob("*")]) == n_files


def test_a_text_that_may_not_go_to_disk_stays_in_memory_and_replaces_none_that_may(
    tmp_path: Path,
) -> None:
    idle = IdleTexts(files=TextFiles(tmp_path, MODEL, 10**6))
    put(idle, ONE[:50], STATE[:50])
    put(idle, ONE, on_disk=False)
    put(idle, TWO, on_disk=False)
    assert found(idle, ONE) == (STATE, 100)
    idle.close()
    assert found(kept(tmp_path), ONE) == (STATE[:50], 50)
    assert found(kept(tmp_path), TWO) == (b"", 0)


def test_the_texts_used_last_stay_within_the_limit(tmp_path: Path) -> None:
    paths = [write(tmp_path, [n, *ONE], model) for n, model in enumerate((MODEL, OTHER, MODEL))]
    now = time.time()
    for seconds, path in enumerate(paths):
        os.utime(path, (now + seconds - 9, now + seconds - 9))
    size = paths[0].stat().st_size
    idle = kept(tmp_path, max_bytes=3 * size)
    assert found(idle, [0, *ONE]) == (STATE, 101)
    put(idle, TWO)
    idle.close()  # the oldest goes, although it is another model's
    assert [path.exists() for path in paths] == [True, False, True]
    idle = kept(tmp_path, max_bytes=2 * size)
    assert [path.exists() for path in paths] == [True, False, False]
    assert found(idle, [2, *ONE])[1] == 0
    put(idle, [7, *ONE], bytes(2 * size))  # larger than all of it
    idle.close()
    assert paths[0].exists() and len([*tmp_path.glob("*")]) == 2
    os.utime(paths[0], (now - 8 * 24 * 3600, now - 8 * 24 * 3600))
    kept(tmp_path)  # a week later, it goes in any case
    assert not paths[0].exists() and len([*tmp_path.glob("*")]) == 1


def test_a_disk_that_is_too_slow_loses_the_oldest_texts_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.idle.files._MAX_UNWRITTEN", 300)
    monkeypatch.setattr("speculation.idle.files.CLOSE_SECONDS", 0.0)
    may_write, write_file = threading.Event(), TextFiles._write

    def slow_write(*args: Any) -> None:
        may_write.wait()
        write_file(*args)

    monkeypatch.setattr(TextFiles, "_write", slow_write)
    idle = kept(tmp_path)
    texts = [[n, *ONE] for n in range(5)]
    for text in texts:  # the disk takes none; the last stays in main memory
        put(idle, text)
    assert [found(idle, text)[1] for text in texts] == [101, 101, 0, 0, 101]
    threading.Timer(0.1, may_write.set).start()
    idle.close()  # waits for what is being written
    assert found(kept(tmp_path), texts[0]) == (STATE, 101)
    assert len([*tmp_path.glob("*")]) == 1


def test_the_disk_gets_those_used_last_first_and_in_order(tmp_path: Path) -> None:
    idle = IdleTexts(files=TextFiles(tmp_path, MODEL, 10**6))
    for text in (ONE, TWO):
        put(idle, text)
    written = []
    files = idle.files
    assert files is not None
    idle.close()
    written = [text.tokens[0] for text in files.texts]
    assert written == [TWO[0], ONE[0]]
    used = [text.path.stat().st_mtime_ns for text in files.texts]
    assert used[0] > used[1]


def change(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def exchange(path: Path) -> None:
    folder = path.parent / "other"
    shutil.move(write(folder, ONE, OTHER), path)
    folder.rmdir()


def cut(end: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:end])


@pytest.mark.parametrize(
    "damage", [cut(-1), cut(0), change(26), change(60), change(-1), exchange, Path.unlink]
)
@pytest.mark.parametrize("is_running", [False, True])
def test_a_damaged_or_foreign_file_is_ignored_and_removed(
    tmp_path: Path, damage: Callable[[Path], object], is_running: bool
) -> None:
    bad, good = (write(tmp_path, [*ONE[:n], 5]) for n in (80, 60))
    idle = kept(tmp_path) if is_running else None
    damage(bad)
    assert found(idle or kept(tmp_path), ONE) == (STATE, 60)
    assert [*tmp_path.glob("*")] == [good]


def test_a_folder_that_cannot_be_used_is_told_and_keeps_no_model_from_loading(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path / "file")
    with Engine.load(tiny_model, EXACT, keep_texts=10) as engine:
        assert len(engine.submit(ONE[5:], method="ar", max_tokens=3).run().token_ids) == 3
    assert f"cannot keep texts in {tmp_path / 'file'}: File exists" in caplog.text


def test_a_full_disk_loses_the_text_but_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    idle = kept(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    put(idle, ONE)
    idle.close()
    assert "full" in caplog.text
    assert [*tmp_path.iterdir()] == []
    assert idle.files is not None and idle.files.read(idle.files.texts[0]) is None


@pytest.mark.parametrize(("n_slots", "n_shared"), [(1, 0), (1, 200), (2, 200)])
def test_conversations_that_alternate_read_their_new_tails_alone_also_after_a_restart(
    n_slots: int,
    n_shared: int,
    tmp_path: Path,
    tiny_model: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path)
    begun = [9 + i % 70 for i in range(n_shared)]
    texts = {step: [*begun, *(7 + i * step % 90 for i in range(1, 101))] for step in (1, 3, 7)}
    written, unread = [], []
    for _ in range(2):
        with Engine.load(tiny_model, EXACT, parallel=n_slots, keep_texts=10) as kept:
            for step in (1, 3, 7) * 2:
                before, prompt = len(texts[step]), [*texts[step], 5, 6]
                reply = kept.submit(prompt, method="ar", max_tokens=9).run()
                unread.append(before - reply.stats.n_reused)
                written.append((prompt, reply.token_ids))
                texts[step] = [*prompt, *reply.token_ids]
    assert unread == [100 + n_shared, 100, 100, *[1] * 9]  # the last token was never read
    for prompt, tokens in written:
        engine.call(lambda: engine.cache.truncate(0))
        assert engine.generate(prompt, method="ar", max_tokens=9).run().token_ids == tokens


def test_a_restarted_engine_goes_on_with_a_text_on_disk(
    tmp_path: Path, tiny_model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path)
    other = write_tiny_gguf(tmp_path / "other.gguf", n_layer=1)
    prompt = [7 + i % 90 for i in range(300)]

    def reply(model: Path, prompt: list[int], n_ctx: int = 512) -> tuple[list[int], int]:
        params = replace(EXACT, n_ctx=n_ctx)
        with Engine.load(model, params, parallel=2, keep_texts=10) as parallel:
            written = parallel.submit(prompt, method="ar", max_tokens=9).run()
        return written.token_ids, written.stats.n_reused

    with Engine.load(tiny_model, replace(EXACT, n_ctx=512), parallel=2, keep_texts=10) as secret:
        secret.submit(prompt, method="ar", max_tokens=9, on_disk=False).run()
        secret.submit([*prompt[:100], 5], method="ar", max_tokens=9).run()
    (path,) = tmp_path.glob("*.text")
    path.unlink()
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
