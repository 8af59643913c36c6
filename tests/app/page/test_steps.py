"""The steps of a reply: kept, read back and joined; and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from app.page.outcome import outcome
from app.page.steps import cells, pack, shown
from app.worker.messages import Done, Node, StepRecord
from tests.support.fake_backend import DONE, MODEL

AUTO = replace(DONE, method="auto", n_tokens=99, n_first=1, n_drafted=80, n_accepted=60)


def plain(piece: str = "a", decode_ms: float = 10.0) -> StepRecord:
    return StepRecord(0.1, decode_ms, 0.2, 1, 1, (), (), piece)


def drafted(*pieces: str, source: str = "suffix", bonus: str = "!", **more: Any) -> StepRecord:
    """A step whose drafts are a chain, all of them accepted."""
    nodes = tuple(Node(i - 1, piece, source) for i, piece in enumerate(pieces))
    record = StepRecord(1.0, 20.0, 0.5, len(nodes) + 1, 1, nodes, tuple(range(len(nodes))), bonus)
    return record._replace(**more)


def test_steps_are_kept_small_and_read_back_as_they_were() -> None:
    nodes = Node(-1, " \ufffd", "suffix"), Node(-1, "é", "recycling"), Node(1, "x", "suffix")
    tree = StepRecord(0.5, 12.25, 0.125, 4, 2, nodes, (1, 2), "")
    kept = pack([plain(), tree], "auto")
    assert json.loads(shown(kept)) == {
        "method": "auto",
        "sources": ["suffix", "recycling"],
        "steps": [
            [0.1, 10.0, 0.2, 1, 1, [], [], "a"],
            [0.5, 12.25, 0.125, 4, 2, [[-1, " \ufffd", 0], [-1, "é", 1], [1, "x", 0]], [1, 2], ""],
        ],
    }
    assert len(pack([plain()] * 2000, "auto")) < 1000


def test_the_bar_has_a_cell_for_each_step_but_the_first_and_joins_neighbours() -> None:
    steps = [plain("prompt", 999.0), plain(), drafted("b", "c"), plain("", 5.0)]
    assert cells(steps) == [[10.3, 1], [21.5, 3], [5.3, 0]]
    assert cells([]) == cells(steps[:1]) == []
    joined = cells([plain(), *[plain(), drafted("b", "c")] * 399])
    assert (len(joined), joined[0], joined[-1]) == (400, [10.3, 1], [31.8, 2])
    assert sum(spent for spent, _ in joined) == pytest.approx(399 * 31.8)


def said(*records: StepRecord, done: Done = AUTO, message: str = "") -> str:
    return outcome(done, records, message).sentence


TEXT = "one two three four"
COPIED = drafted(" two", " three", bonus=" four")
PLAIN = [plain() for _ in range(8)]  # 10.2 ms without drafting


def test_a_sentence_says_how_fast_it_was_and_where_the_drafts_came_from() -> None:
    # 98 tokens after the first step: 30 times three in 14.8 ms, and eight in 10.3 ms each. Plain
    # steps without drafting take 10.2 ms.
    copied = [plain("one"), *[COPIED._replace(decode_ms=13.3, bonus="one")] * 30, *PLAIN]
    about = "98 tokens/s, about 1.9× plain: 60 of 99 tokens were copied from your message"
    assert said(*copied, message=TEXT) == about
    copied[-1] = plain(decode_ms=500.0)  # a pause
    assert said(*copied, message=TEXT) == about
    # The token before it is another one in the message.
    assert said(plain("ten"), *[COPIED] * 30, *PLAIN, message=TEXT).endswith(
        "60 of 99 tokens were copied from earlier text"
    )
    attached = outcome(AUTO, copied, f"shop.txt:\n{TEXT}", files=TEXT).sentence
    assert attached.endswith("60 of 99 tokens were copied from your file")
    mixed = [*copied[:21], *[drafted("x", "y", source="recycling")] * 10, *PLAIN]
    assert said(*mixed, message=TEXT).endswith(
        ": 60 of 99 tokens were drafted, 40 of them copied from your message"
    )
    eagle = [plain(), *[drafted("x", "y", source="eagle-3")] * 30, *PLAIN]
    assert said(*eagle).endswith(": 60 of 99 tokens were drafted by eagle-3")


def test_a_sentence_says_when_drafts_did_not_pay() -> None:
    costs = (10.0, 12.0, 15.0, 19.0)
    none = replace(AUTO, n_drafted=0, n_accepted=0, decode_ms=costs)
    assert said(*PLAIN, done=none) == (
        "98 tokens/s. No drafts: verifying 4 tokens costs 1.9× one token on this machine"
    )
    assert said(*PLAIN, done=replace(none, decode_ms=(10.0, 10.1, 10.5, 11.0))) == (
        "98 tokens/s. No drafts: none was likely enough"
    )
    mamba = replace(none, decode_ms=(), model=replace(MODEL, can_draft=False))
    assert said(*PLAIN, done=mamba) == (
        "98 tokens/s. No drafts: this model is recurrent and cannot drop rejected ones"
    )
    few = replace(AUTO, n_accepted=5, n_drafted=60, decode_seconds=1.4)
    slow = [plain(), *[drafted("x", decode_ms=28.5)] * 50, *PLAIN]  # two tokens in 30 ms
    assert said(*slow, done=few) == (
        "70 tokens/s, about 0.7× plain: 5 of 99 tokens were drafted. Only 5 of 60 drafts were "
        "right. Auto learns from that and drafts less"
    )
    nothing = replace(none, method="suffix:memory=off")
    assert said(*PLAIN, done=nothing) == "98 tokens/s. No drafts: suffix:memory=off found none"
    wrong = replace(AUTO, n_accepted=0, n_drafted=4)
    assert said(plain(), *PLAIN * 4, done=wrong) == (
        "98 tokens/s, about 1.0× plain: 0 of 4 drafts were accepted"
    )


def test_a_sentence_says_what_took_the_time_of_a_slow_reply_and_what_would_help() -> None:
    done = replace(AUTO, method="draft-model", n_drafted=144, n_accepted=144, n_tokens=153)

    def why(*records: StepRecord, **changes: Any) -> str:
        return said(plain(), *records, *PLAIN, done=replace(done, **changes)).partition(". ")[2]

    long = drafted("x", "y", source="draft", draft_ms=40.0)
    assert why(*[long] * 40) == "The draft model took 66% of the time. A smaller one would help"
    dear = long._replace(draft_ms=1.0, decode_ms=60.0)
    assert why(*[dear] * 40) == (
        "Most drafts were right, but verifying several tokens takes long on this machine. "
        "The method Auto drafts only where it pays"
    )
    cold = [dear._replace(decode_ms=1000.0)] * 2
    assert why(*[dear] * 20, *cold) == (
        "2.0 s went into 2 of 22 steps: the machine was busy, or the model was new to it. Try again"
    )
    reading = [dear._replace(draft_ms=3000.0)]
    assert why(*[dear] * 20, *reading) == (
        "3.1 s went into 1 of 21 steps, in which what drafts read the text first; the next reply "
        "is faster"
    )
    eagle = long._replace(nodes=tuple(one._replace(source="eagle-3") for one in long.nodes))
    assert why(*[eagle] * 40) == "Eagle-3 took 66% of the time. Another method would help"
    assert why(*[COPIED._replace(decode_ms=13.3)] * 40) == ""


def test_a_sentence_claims_no_speed_that_is_not_known() -> None:
    came = "98 tokens/s. 60 of 99 tokens were drafted"
    assert said() == came
    short = replace(AUTO, n_tokens=12, n_accepted=1, decode_seconds=0.3)
    assert said(plain(), drafted("x"), *PLAIN, done=short) == (
        "37 tokens/s. 1 of 12 tokens was copied from earlier text"
    )
    # Steps that also decoded other texts tell nothing of this one's speed.
    beside = [drafted("x", "y", bonus="z", n_texts=2, decode_ms=200.0)] * 10
    others = "Other replies were written at the same time; alone, it would have been faster"
    assert said(plain(), *beside, *PLAIN, message="") == f"{came}. {others}"
    alone = [COPIED._replace(decode_ms=13.3)] * 30
    assert said(plain(), *beside, *alone, *PLAIN).startswith("98 tokens/s, about 1.9× plain: ")
    assert said(done=replace(AUTO, method="ar")) == (
        "98 tokens/s. Plain decoding: one token a step, no drafts"
    )
    assert said(done=Done("cancelled", "auto")) == "No tokens were written"


def test_the_figures_say_what_is_known_of_plain_decoding() -> None:
    done = replace(AUTO, n_steps=11, finish_reason="length", decode_ms=(10.0, 12.0, 15.0, 19.0))
    drawn = {"temperature": 0.7, "seed": 5}
    records = [plain(), COPIED, *PLAIN]
    assert outcome(done, records, TEXT, n_left_out=1, sampling=drawn).figures == (
        ("Speed", "98 tokens/s"),
        ("A plain step", "10.2 ms, the median of 8 in this reply"),
        ("Tokens per step", "9.0"),
        ("Accepted", "60 of 80 drafts (75%)"),
        ("Accepted drafts", "2 by suffix"),
        ("A step", "drafting 0.20 ms, decoding 11.1 ms, accepting 0.23 ms"),
        ("Checking 4 tokens", "1.9 times one"),
        ("First token", "after 0.25 s, 228 of 228 prompt tokens read"),
        ("Context", "327 of 2048 tokens"),
        ("Left out", "1 turn"),
        ("End", "length limit"),
        ("Sampling", "temperature 0.7, seed 5"),
    )
