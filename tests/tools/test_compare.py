"""Comparisons with llama-server and of methods: what they print. No server is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batching.llama.library import library_folder
from tools.compare import Cell, Reply, _reply, libraries, report
from tools.judge import ratios_of, table


def cell(contender: str, number: int, seconds: float, *texts: str) -> Cell:
    return Cell(contender, 2, number, [Reply(text, 10, 0.5) for text in texts], seconds)


def test_replies_are_put_together_and_ratios_medians_of_the_rounds() -> None:
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


def rows(category: str, auto: float, mean: float, suffix: float) -> list[dict[str, Any]]:
    row = {"category": category, "speed_up_mean": mean}
    return [
        {**row, "method": name, "tokens_per_second": speed, "speed_up_overall": speed / 10.0}
        for name, speed in (("ar", 10.0), ("suffix", suffix), ("auto", auto))
    ]


def test_ratios_are_to_plain_decoding_and_the_best_single_method_and_medians_shown() -> None:
    summary = [*rows("a", 20.0, 1.5, 16.0), *rows("b", 8.0, 0.9, 5.0), *rows("c", 20.0, 0.0, 9.0)]
    assert ratios_of(summary) == {"a": (2.0, 1.5, 1.25), "b": (0.8, 0.9, 0.8)}
    runs = [(2.0, 1.5, 1.25), (2.5, 1.0, 1.0), (1.1, 1.25, 3.0)]
    assert table({("m", "a"): runs, ("m", "all"): runs[:1]}).splitlines() == [
        "| model | prompts | over plain | mean | over best single |",
        "|---|---|---|---|---|",
        "| m | a | 2.00 | 1.25 | 1.25 |",
        "| m | all | 2.00 | 1.50 | 1.25 |",
    ]
