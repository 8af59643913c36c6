"""Races: runs in turn, the speed-up with its range, and where texts part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.page.outcome import outcome
from app.page.race import Json, race
from app.page.steps import cells, pack, shown
from app.worker.messages import (
    ChatRequest,
    Done,
    Event,
    Failed,
    Loaded,
    ModelSpec,
    Steps,
    Tokens,
)
from tests.support.fake_backend import DONE, FakeBackend
from tests.support.local_backend import LocalBackend

REQUEST = ChatRequest("race", ({"role": "user", "content": "Repeat: one two"},), "auto")


def reply(seconds: float, *texts: str, n: int = 65) -> list[Event]:
    """A reply whose tokens have these texts; each text's length is its id."""
    tokens = [Tokens(((text, False),), (len(text),)) for text in texts]
    done = replace(DONE, n_tokens=n, n_first=1, decode_seconds=seconds)
    return [*tokens, done]


def result_of(backend: FakeBackend, *methods: str, rounds: int, **more: object) -> Json:
    asked = replace(REQUEST, **more)  # type: ignore[arg-type]
    *_, last = race(backend, asked, (methods[0], methods[1]), rounds)
    return dict(last["result"])


def running(n: int, n_rounds: int, method: str, n_tokens: int) -> Json:
    return {"progress": {"round": n, "n_rounds": n_rounds, "method": method, "n_tokens": n_tokens}}


def test_methods_run_in_turn_without_the_memory_and_the_median_counts() -> None:
    spent = [1.0, 0.5, 0.25, 1.0, 1.0, 0.4]  # ar, auto, auto, ar, ar, auto
    texts = ["a", "a", "a", "a", "bc", "bc"]
    backend = FakeBackend(*map(reply, spent, texts))
    result = result_of(backend, "ar", "auto", rounds=3, memory="tab", record=True)
    assert [request.method for request in backend.requests] == "ar auto auto ar ar auto".split()
    assert {(request.memory, request.record) for request in backend.requests} == {(None, False)}
    assert result["sentence"] == "Auto is 2.5× as fast as plain decoding (2.0× to 4.0× in 3 rounds)"
    assert result["texts"] == "Same text ✓"
    assert [(run["method"], run["tokens"][0][1]) for run in result["played"]] == [
        ("ar", "bc"),
        ("auto", "bc"),
    ]


def test_tokens_have_their_times_and_progress_comes_ten_times_a_second() -> None:
    clock = iter([5.0, 5.05, 5.2, 5.25] * 2)
    done = replace(DONE, n_tokens=65, decode_seconds=1.0)
    events = [Tokens(((text, True), ("", False)), (1, 2)) for text in "abcd"]
    backend = FakeBackend([*events, done], [*events, done], [Failed("no model")])
    *found, result = race(backend, REQUEST, ("ar", "auto"), 1, clock=lambda: next(clock))
    assert found == [running(0, 1, name, n) for name in ("ar", "auto") for n in (0, 6)]
    tokens = result["result"]["played"][0]["tokens"]
    assert [(at, text) for at, text, drafted in tokens if drafted] == [
        (0.0, "a"),
        (0.05, "b"),
        (0.2, "c"),
        (0.25, "d"),
    ]
    failed = race(backend, REQUEST, ("ar", "auto"))
    assert list(failed) == [running(0, 3, "ar", 0), {"error": "no model"}]
    stopped = FakeBackend([Done("cancelled", "ar")])
    assert list(race(stopped, REQUEST, ("ar", "auto"))) == [running(0, 3, "ar", 0)]


def test_runs_that_are_too_short_together_give_no_number() -> None:
    for seconds, n in ((0.2, 65), (1.0, 20)):
        short = FakeBackend(*[reply(seconds, "a", n=n)] * 4)
        result = result_of(short, "ar", "auto", rounds=2)
        assert result["sentence"] == "Too short for a number"
    enough = FakeBackend(*[reply(0.3, "a", n=40)] * 4)
    assert "is 1.0× as fast" in result_of(enough, "ar", "auto", rounds=2)["sentence"]


def test_where_texts_part_is_told() -> None:
    backend = FakeBackend(reply(1.0, "xy", "abc"), reply(1.0, "xy", "abd?"))
    assert result_of(backend, "ar", "guess", rounds=1)["texts"] == "The texts part at token 2"


@pytest.fixture(scope="module")
def bundled() -> Iterator[LocalBackend]:
    made = LocalBackend()
    loaded = list(made.load(ModelSpec("bundled", 512, n_threads=1)))[-1]
    assert isinstance(loaded, Loaded)
    yield made
    made.close()


def test_a_reply_of_a_model_is_summed_up(bundled: LocalBackend) -> None:
    ends = dict.fromkeys(bundled.status().facts.ends, -math.inf)  # it goes on
    sampling = {"regex": "(one two three )+", "logit_bias": ends}
    message = "Say this again and again: one two three one two three one two three"
    asked = replace(
        REQUEST,
        messages=({"role": "user", "content": message},),
        method="prompt-lookup",
        sampling=sampling,
        max_tokens=60,
        record=True,
    )
    *events, done = bundled.reply(asked)
    assert isinstance(done, Done)
    records = [one for event in events if isinstance(event, Steps) for one in event.records]
    kept = json.loads(shown(pack(records, done.method)))
    assert (len(kept["steps"]), kept["method"]) == (len(records), "prompt-lookup")
    assert sum(tokens for _, tokens in cells(records)) == 60 - done.n_first
    found = outcome(done, records, message)
    assert f"{done.n_accepted} of " in found.sentence
    assert dict(found.figures)["Accepted"].startswith(f"{done.n_accepted} of {done.n_drafted} ")
    assert len(done.decode_ms) == 8


def test_a_race_on_a_model_ends_with_what_both_wrote(bundled: LocalBackend) -> None:
    sampling = {"grammar": 'root ::= "one two three four five six seven eight nine ten"'}
    request = replace(REQUEST, sampling=sampling)
    *told, end = race(bundled, request, ("ar", "prompt-lookup"), 2)
    begun = [one["progress"] for one in told if not one["progress"]["n_tokens"]]
    in_turn = ["ar", "prompt-lookup", "prompt-lookup", "ar"]
    assert [one["method"] for one in begun] == in_turn
    assert end["result"]["texts"] == "Same text ✓"
    for run in end["result"]["played"]:
        text = "".join(text for _, text, _ in run["tokens"])
        assert text == "one two three four five six seven eight nine ten"
        assert [at for at, _, _ in run["tokens"]] == sorted(at for at, _, _ in run["tokens"])
