"""The comparison with llama-server: what it prints. The servers themselves are not started."""

from __future__ import annotations

from pathlib import Path

from batching.llama.library import library_folder
from tools.compare import Cell, Reply, _reply, libraries, report


def cell(contender: str, number: int, seconds: float, *texts: str) -> Cell:
    return Cell(contender, 2, number, [Reply(text, 10, 0.5) for text in texts], seconds)


def test_ratios_are_medians_of_the_rounds_own() -> None:
    cells = [
        cell("none", 0, 1.0, "a", "b"),
        cell("ours ar", 0, 2.0, "a", "b"),
        cell("ours auto", 0, 1.0, "a", "c"),
        cell("ours ar", 1, 2.0, "d", "e"),
        cell("ours auto", 1, 0.5, "d", "e"),
        cell("none", 1, 1.0, "d", "e"),
    ]
    assert report(cells).splitlines() == [
        "2 clients, 2 rounds",
        "  none: 20.0 tokens/s, 20.0 over all; first token 0.50 s, p99 0.50",
        "  ours ar: 10.0 tokens/s, 10.0 over all; first token 0.50 s, p99 0.50; / none 0.500; "
        "4 of 4 texts as none",
        "  ours auto: 30.0 tokens/s, 26.7 over all; first token 0.50 s, p99 0.50; / none 1.500; "
        "/ ours ar 3.000; 3 of 4 texts as none",
    ]


def test_a_streamed_reply_is_put_together() -> None:
    lines = [
        b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n',
        b'data: {"choices": [{"delta": {"content": "a c"}}]}\n',
        b'data: {"choices": [{"delta": {"content": "at"}}]}\n',
        b"\n",
        b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n',
        b"data: [DONE]\n",
    ]
    assert _reply(lines, 0.25) == Reply("a cat", 2, 0.25)


def test_libraries_are_the_same_only_if_their_bytes_are(tmp_path: Path) -> None:
    assert any(path.name.startswith(("libllama", "llama")) for path in library_folder().iterdir())
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        for name in ("libllama.so", "libggml-cpu.so", "libllama.so.0", "libmtmd.so"):
            (folder / name).write_bytes(name.encode())
    (theirs / "libmtmd.so").write_bytes(b"not used")
    assert libraries(ours, theirs) == "libraries: identical on both sides"
    (theirs / "libggml-cpu.so").write_bytes(b"other")
    (theirs / "libggml-cuda.so").write_bytes(b"new")
    line = libraries(ours, theirs)
    assert "NOT the same build (libggml-cpu.so, libggml-cuda.so differ)" in line
    assert f"LLAMA_CPP_LIB_PATH={theirs}" in line
    assert libraries(ours, tmp_path).startswith("libraries: none in ")
