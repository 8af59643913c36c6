"""The table of ``auto`` beside plain decoding and the best single method."""

from __future__ import annotations

from speculation.bench.results import Run
from speculation.stats import Stats
from tools.judge import figures, table


def run(method: str, prompt_id: str, n_tokens: int, seconds: float) -> Run:
    stats = Stats(n_tokens=n_tokens, n_first=1, n_steps=n_tokens, decode_seconds=seconds)
    if method == "auto":
        stats.n_drafted, stats.n_expected, stats.n_accepted = 8, 2.5, 2
    return Run(method, prompt_id, prompt_id[0], 0, [0] * n_tokens, "length", stats)


def repetition(auto_seconds: float) -> list[Run]:
    return [
        run("ar", "a1", 11, 10.0),
        run("suffix", "a1", 11, 8.0),
        run("auto", "a1", 11, auto_seconds),
        run("ar", "b1", 11, 10.0),
        run("suffix", "b1", 11, 20.0),
        run("auto", "b1", 11, 12.5),
        run("ar", "b2", 1, 0.0),
        run("suffix", "b2", 1, 0.0),
        run("auto", "b2", 1, 0.0),
    ]


def test_the_figures_are_medians_over_repetitions_of_speed_ratios() -> None:
    found = figures([repetition(5.0), repetition(4.0), repetition(9.0)])
    assert found.plain == {"a": 2.0, "b": 0.8, "all": 20 / 17.5}
    assert found.mean == {"a": 2.0, "b": 0.8, "all": 1.4}
    assert found.single == {"a": 1.6, "b": 0.8, "all": 20 / 17.5}
    assert found.first == [2.0, 0.8, 1.0]
    assert found.together == 20 / 17.5
    assert table({"m": found}).splitlines()[2] == (
        "| m | 1.14 (1.40) | 0.80 b | 1.14 | 0.80 b | 1.14 | 0.80 |"
    )
    assert table({"m": found}).splitlines()[-4:] == [
        "| a | 6 of 8 (24) |",
        "| b | 12 of 15 (48) |",
        "| all | 18 of 22 (72) |",
        "| first 10 | 18 of 22 (72) |",
    ]
