"""SuffixMemory: what is remembered of texts, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from speculation.drafting.suffix_memory import SuffixMemory

CHAT = list(range(100, 150))
OWNER = "0123456789abcdef"


def test_only_the_new_part_of_a_continued_chat_is_added() -> None:
    memory = SuffixMemory()
    memory.remember(CHAT)
    memory.remember([*CHAT, 7, 8, 9])
    memory.remember([*CHAT, 7, 8, 9, 10])
    assert memory.index.tokens().tolist() == [
        *CHAT, -1,
        *CHAT[-32:], 7, 8, 9, -1,
        *CHAT[-29:], 7, 8, 9, 10, -1,
    ]  # fmt: skip


def test_a_known_text_is_not_added_again() -> None:
    memory = SuffixMemory()
    memory.remember(CHAT)
    memory.remember(CHAT)
    memory.remember(CHAT[:40])
    assert memory.index.tokens().tolist() == [*CHAT, -1]


def test_a_known_text_that_repeats_itself_is_not_added_again() -> None:
    memory, text = SuffixMemory(), [*[1, 2, 3] * 20, 4, 5, *[1, 2, 3] * 20]
    memory.remember(text)
    memory.remember(text)
    assert memory.index.tokens().tolist() == [*text, -1]


def test_nothing_is_remembered_while_paused() -> None:
    memory = SuffixMemory()
    with memory.paused():
        memory.remember(CHAT)
    assert memory.index.n_tokens == 0


def test_the_memory_grows_up_to_its_capacity_and_then_forgets_the_oldest() -> None:
    memory = SuffixMemory(1 << 15)
    texts = [[n * 1000 + i for i in range(999)] for n in range(40)]
    for text in texts:
        memory.remember(text)
    assert memory.index.n_tokens == memory.index.capacity == 1 << 15
    everything = [token for text in texts for token in (*text, -1)]
    assert memory.index.tokens().tolist() == everything[-(1 << 15) :]


def test_a_million_tokens_take_less_than_100_mb() -> None:
    memory = SuffixMemory()
    memory.remember([*range(50_000)] * 20)
    assert memory.index.n_tokens == 1_000_001
    assert memory.index.n_bytes == 37_750_400


def test_a_saved_memory_is_loaded_again(tmp_path: Path) -> None:
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.remember(CHAT)
    memory.remember([5, 6, 7])
    memory.save(path, OWNER)
    loaded = SuffixMemory.load(path, OWNER, n_vocab=150)
    assert loaded.index.tokens().tolist() == [*CHAT, -1, 5, 6, 7, -1]
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    assert path.stat().st_size == 32 + 4 * 55


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    SuffixMemory().save(path, OWNER)
    with pytest.raises(InvalidParameter, match=r"memory has the memory of another model; give"):
        SuffixMemory.load(path, "f" * 16, n_vocab=150)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"GGUF" + content[4:], "is not a memory file of this version"),
        (lambda content: content[:20], "is not a memory file of this version"),
        (lambda content: content[:-4], "is damaged: it has 232 bytes instead of 236"),
        (lambda content: content[:-4] + b"\xff\xff\xff\x7f", "is damaged: it has unknown tokens"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(tmp_path: Path, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.remember(CHAT)
    memory.save(path, OWNER)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidParameter, match=f"memory {reason}.*; give another file, or delete"):
        SuffixMemory.load(path, OWNER, n_vocab=150)
