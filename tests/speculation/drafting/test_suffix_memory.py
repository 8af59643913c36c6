"""SuffixIndex: hash chains over the last tokens. SuffixMemory: texts in one, and its file."""

from __future__ import annotations

import random
import stat
import sys
from array import array
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from speculation.drafting.suffix_index import LENGTHS, SEPARATOR, SuffixIndex, agreement
from speculation.drafting.suffix_memory import SuffixMemory


def copies(index: SuffixIndex, n: int, text: list[int] | None = None) -> list[list[int]]:
    """The next three tokens after each match of the last ``n``, latest first."""
    positions = index.matches(LENGTHS.index(n), text or index.tokens, 8)
    return [index.copy(position, 3).tolist() for position in positions]


def test_matches_are_the_earlier_occurrences_latest_first() -> None:
    index = SuffixIndex([1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 2, 9, 9, 9, 1, 2])
    assert copies(index, 2) == [[8, 8, 8], [7, 7, 7]]
    assert copies(index, 1) == [[9, 9, 9], [8, 8, 8], [7, 7, 7]]
    assert copies(index, 4) == []


def test_a_copy_repeats_its_period_and_neither_it_nor_a_match_crosses_the_end_of_a_text() -> None:
    assert copies(SuffixIndex([5, 6, 5, 6]), 2) == [[5, 6, 5]]
    memory = SuffixIndex([1, 2, 3, SEPARATOR, 4, 5, SEPARATOR])
    assert copies(memory, 2, [1, 2]) == [[3]]
    assert copies(memory, 2, [3, 4]) == []
    assert copies(memory, 2, [2, 3]) == []  # nothing follows in that text


@pytest.mark.parametrize("n_at_once", [1, 70])
def test_every_length_is_found_while_the_tables_grow(n_at_once: int) -> None:
    index = SuffixIndex()
    for end in range(n_at_once, 5000, n_at_once):
        index.extend(range(end - n_at_once, end))
        for at in range(16, end - 2, 160):
            for n in LENGTHS if n_at_once > 1 or not end % 50 else ():
                assert copies(index, n, [*range(at - n, at)]) == [[at, at + 1, at + 2]]


@pytest.mark.parametrize("n_tokens", [100, 700, 2000])
def test_bulk_and_single_tokens_build_the_same_index(n_tokens: int) -> None:
    rng = random.Random(n_tokens)
    tokens = [rng.randrange(8) for _ in range(n_tokens)]
    ours, single = SuffixIndex(), SuffixIndex()
    for start in range(0, n_tokens, 300):
        ours.extend(tokens[start : start + 300])
    for i in range(n_tokens):
        single.extend(tokens[i : i + 1])
    assert ours.tokens == single.tokens
    for _ in range(50):
        text = [rng.randrange(8) for _ in range(20)]
        for n in LENGTHS:
            assert copies(ours, n, text) == copies(single, n, text)
        token = [rng.randrange(8)]
        ours.extend(token)
        single.extend(token)


def test_the_longest_end_of_a_text_that_occurs_is_found_by_its_level() -> None:
    memory = SuffixIndex([1, 2, 3, 4, 5, 6, 7, 8, 9, SEPARATOR])
    ends = ([7, 7], [7, 4], [3, 4], [1, 2, 3, 4], [9, *range(1, 9)])
    assert [memory.longest(end)[0] for end in ends] == [0, 0, 1, 2, 3]
    assert memory.longest([7, 4], shortest=1)[0] == -1
    assert memory.longest([99])[0] == -1
    assert memory.longest([4])[0] == 0  # a text of one token has no longer end


def test_the_common_context_is_counted_up_to_32() -> None:
    text = array("i", range(100, 140))
    memory = SuffixIndex([1, *text[-20:], 2, 3, *text, 4, 5, SEPARATOR])
    positions = memory.matches(LENGTHS.index(8), text, 8)
    assert [memory.common_context(p, text) for p in positions] == [32, 20]
    assert memory.common_context(positions[0], text[-9:]) == 9


def test_agreement_is_the_length_of_the_shared_prefix() -> None:
    rng = random.Random(1)
    for _ in range(500):
        n = rng.randrange(20)
        prefix = [rng.randrange(5) for _ in range(n)]
        others = [array("i", [*prefix, i, *range(rng.randrange(9))]) for i in range(3)]
        assert agreement(others) == n
        assert agreement([others[0], array("i", prefix)]) == n
        assert agreement([others[0], others[0][:]]) == len(others[0])


CHAT = list(range(100, 150))
OWNER = "0123456789abcdef"


def test_only_the_new_part_of_a_continued_chat_is_added() -> None:
    memory = SuffixMemory()
    memory.remember(CHAT)
    memory.remember([*CHAT, 7, 8, 9])
    memory.remember([*CHAT, 7, 8, 9, 10])
    assert memory.index.tokens.tolist() == [
        *CHAT, -1,
        *CHAT[-32:], 7, 8, 9, -1,
        *CHAT[-29:], 7, 8, 9, 10, -1,
    ]  # fmt: skip


def test_a_known_text_is_not_added_again_and_none_while_paused() -> None:
    repeated = [*[1, 2, 3] * 20, 4, 5, *[1, 2, 3] * 20]
    for text, again in ((CHAT, CHAT), (CHAT, CHAT[:40]), (repeated, repeated)):
        memory = SuffixMemory()
        memory.remember(text)
        memory.remember(again)
        with memory.paused():
            memory.remember([5, 6, 7])
        assert memory.index.tokens.tolist() == [*text, -1]


def test_the_memory_forgets_its_older_half_where_there_is_no_room() -> None:
    memory = SuffixMemory(1 << 15)
    texts = [[n * 1000 + i for i in range(999)] for n in range(40)]
    for text in texts:
        memory.remember(text)
    everything = [token for text in texts for token in (*text, -1)]
    # The half was kept when the 33rd text came; seven more followed.
    assert memory.index.tokens.tolist() == everything[-(1 << 14) - 8000 :]
    assert len(memory.index.matches(3, texts[39][:500], 1)) == 1
    assert memory.index.matches(3, texts[0][:500], 1) == []
    memory.remember(range(100_000, 140_000))
    assert memory.index.tokens.tolist()[-(1 << 14) :] == [
        *range(140_000 - (1 << 14) + 1, 140_000),
        -1,
    ]


def test_a_million_tokens_take_less_than_100_mb() -> None:
    memory = SuffixMemory()
    memory.remember([*range(50_000)] * 20)
    assert len(memory.index.tokens) == 1_000_001
    assert memory.index.n_bytes < 38_000_000


def test_a_saved_memory_is_loaded_again(tmp_path: Path) -> None:
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.remember(CHAT)
    memory.remember([5, 6, 7])
    memory.save(path, OWNER)
    loaded = SuffixMemory.load(path, OWNER, n_vocab=150)
    assert loaded.index.tokens.tolist() == [*CHAT, -1, 5, 6, 7, -1]
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    assert sys.platform == "win32" or stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidParameter, match=r"memory has the memory of another model; give"):
        SuffixMemory.load(path, "f" * 16, n_vocab=150)
    assert path.stat().st_size == 32 + 4 * 55


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"GGUF" + content[4:], "is not a memory file of this version"),
        (lambda content: content[:20], "is not a memory file of this version"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.remember(CHAT)
    memory.save(path, OWNER)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidParameter, match=f"memory {reason}.*; give another file, or delete"):
        SuffixMemory.load(path, OWNER, n_vocab=150)


@pytest.mark.parametrize("end", [b"", b"\xff\xff\xff\x7f", b"\xfe\xff\xff\xff", bytes(5)])
def test_a_damaged_file_is_put_aside_for_a_new_one(
    tmp_path: Path, end: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.remember(CHAT)
    memory.save(path, OWNER)
    damaged = path.read_bytes()[:-4] + end
    path.write_bytes(damaged)
    assert SuffixMemory.load(path, OWNER, n_vocab=150).index.tokens.tolist() == []
    assert (tmp_path / "memory.damaged").read_bytes() == damaged
    assert not path.exists()
    assert "memory is damaged: it is kept as" in caplog.text
