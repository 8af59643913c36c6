"""What models that cannot go back to any part of a text read again: of hybrids and of models with a
sliding window, in chats that begin alike, at each turn and after a restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from speculation.engine import Engine
from speculation.request import Request
from speculation.settings import as_method
from tests.support.exact import EXACT
from tests.support.tiny_gguf import N_TINY, vocabulary, write_hybrid_gguf, write_window_gguf

TOKENS = vocabulary()[0]
END, USER, REPLY = (TOKENS.index(f"<|{name}|>") for name in ("end", "user", "assistant"))


def words(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(REPLY + 2, N_TINY) for _ in range(n)]


def question(seed: int) -> list[int]:
    """100 tokens of a user, 102 with the marks before and after."""
    return [USER, *words(100, seed), END]


SYSTEM = [1, *words(3999, 1), END]  # and the mark of its end: 4,001 tokens


@pytest.mark.parametrize("n_slots", [1, 3])
@pytest.mark.parametrize(
    ("write", "n_common"), [(write_window_gguf, 4002), (write_hybrid_gguf, 4001)]
)
def test_chats_with_the_same_system_text_and_each_turn_read_what_is_new_also_after_a_restart(
    write: Callable[..., Path],
    n_common: int,
    n_slots: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path / "texts")
    model = write(tmp_path / "model.gguf", n_ctx=8192)
    params = replace(EXACT, n_ctx=4864 * n_slots)
    chats: dict[int, list[int]] = {}
    written, unread = [], []

    def reply(engine: Engine, chat: int, turn: int) -> None:
        """Another turn of a chat."""
        prompt = [*chats.get(chat, SYSTEM), *question(10 * chat + turn), REPLY]
        done = engine.submit(prompt, method="ar", max_tokens=8).run()
        written.append((prompt, done.token_ids))
        unread.append(len(prompt) - 1 - done.stats.n_reused)
        chats[chat] = [*prompt, *done.token_ids, END]

    for first in (0, 2):
        with Engine.load(model, params, parallel=n_slots, keep_texts=1000) as engine:
            for turn in range(2):
                for chat in (0, 1, first):
                    reply(engine, chat, turn)
            for prompt, tokens in written[1::5] if first else ():
                request = Request(tuple(prompt), as_method("ar"), max_tokens=8, reuse=False)
                anew = engine.start(request).run()
                assert (anew.token_ids, anew.stats.n_reused) == (tokens, 0)
    # A chat's last token was never read: it and the end of the reply precede the question.
    assert unread[0] == 4103
    new = 4103 - n_common
    assert unread[1:] == [new, 104, 104, 104, 104, 104, 104, new, 104, 104, 104]


def test_clients_that_begin_alike_at_once_wait_for_what_one_of_them_reads(tmp_path: Path) -> None:
    model = write_hybrid_gguf(tmp_path / "model.gguf", n_ctx=2048)
    system = [1, *words(999, 1), END]
    with Engine.load(model, replace(EXACT, n_ctx=8192, n_batch=256), parallel=4) as engine:
        prompts = [[*system, *question(seed), REPLY] for seed in range(4)]
        running = [engine.submit(prompt, method="ar", max_tokens=8) for prompt in prompts]
        assert [text.run().stats.n_reused for text in running] == [0, 1001, 1001, 1001]
        assert engine.submit(prompts[1], method="ar", max_tokens=8).run().stats.n_reused == 1095
