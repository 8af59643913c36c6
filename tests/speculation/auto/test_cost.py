"""Cost curves: interpolation, following a text's steps, and measuring on simulated machines."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batching.errors import ContextError
from batching.llama import timing
from batching.llama.context import Context
from batching.llama.model import Model
from batching.llama.timing import affordable_text
from batching.rows import Rows, text_rows
from batching.tree import NO_LIMIT
from speculation.auto import calibration as cost_measured
from speculation.auto import learnt
from speculation.auto.calibration import measure, measure_cost, measure_curve
from speculation.drafting.cost import SIZES, Cost, CostCurve
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(
    ("sizes", "seconds", "expected"),
    [
        ((1, 2, 3, 6), (1.0, 2.0, 3.5, 2.0), {1: 1.0, 2: 2.0, 3: 3.5, 4: 3.0, 5: 2.5, 6: 2.0}),
        ((1, 3), (1.0, 2.0), {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5, 5: 3.0, 100: 50.5}),
        ((1, 48, 64), (1.0, 3.0, 4.0), {64: 4.0, 65: 4.0625, 80: 5.0}),
    ],
)
def test_rows_between_two_sizes_are_interpolated_and_those_beyond_cost_as_much_as_before(
    sizes: tuple[int, ...], seconds: tuple[float, ...], expected: dict[int, float]
) -> None:
    curve = CostCurve(sizes, seconds)
    assert {n: curve.at(n) for n in expected} == expected
    assert curve.row_share == pytest.approx(1.0 / 5) or 6 not in sizes


FAST, SLOW = CostCurve((1, 4, 8), (1.0, 2.0, 3.0)), CostCurve((1, 4, 8), (10.0, 20.0, 30.0))
SWITCHING = [CostCurve((1, 8), (1.0, 2.0), switch_seconds=seconds) for seconds in (0.1, 4.5)]
BEGIN: list[Any] = [()]  # a text begins
ONCE_SLOW = [*[(8, 2.0)] * 600, (8, 200.0), *[(8, 2.0)] * 39]


@pytest.mark.parametrize(
    ("curve", "steps", "expected", "rel"),
    [
        # Single rows set the level, and other sizes their own cost.
        (FAST, [(1, 2.0)] * 320, {1: 2.0, 4: 4.0, 8: 6.0}, 0.05),
        (FAST, [(1, 2.0)] * 320 + [(4, 5.0), (1, 2.0)] * 640, {1: 2.0, 4: 5.0, 8: 6.0}, 0.05),
        # A text that has no single rows does so, too.
        (SLOW, [(4, 2.0), (8, 3.0)] * 320, {1: 1.3, 4: 2.0, 8: 3.0}, 0.05),
        (CostCurve((1, 8), (1.0, 2.0)), ONCE_SLOW, {8: 2.0}, 0.03),  # a decode was interrupted
        # The first two batches of a text or after another size do not count.
        (SWITCHING[0], [*BEGIN, (1, 30.0), (1, 3.0), (8, 9.0), (8, 4.0)] * 500,
         {1: 1.0, 8: 2.0}, 1e-12),
        # What a change of size costs is not learnt as the size's own: 1.5 + 5 + 1 + 1 + 1.
        (SWITCHING[1], [(1, 1.9, 5), (8, 2.5), (8, 6.0), (8, 2.0)] * 160, {1: 1.0, 8: 2.0}, 1e-6),
    ],
)  # fmt: skip
def test_the_curve_follows_the_steps_of_a_text(
    curve: CostCurve, steps: list[Any], expected: dict[int, float], rel: float
) -> None:
    cost = Cost(curve)
    for step in steps:
        if step == BEGIN[0]:
            cost.begin()
        else:
            cost.follow(step[0], 100, step[1], *step[2:])
    assert {n: cost.curve(100).at(n) for n in expected} == pytest.approx(expected, rel=rel)


def test_real_single_rows_set_the_level_of_a_rough_cost_at_once() -> None:
    cost = Cost(CostCurve((1, 8), (10.0, 30.0)), is_rough=True)
    for _ in range(3):
        cost.follow(1, 100, 1.0)
    assert not cost.is_checked
    cost.follow(1, 100, 1.0)
    assert (cost.is_checked, cost.curve(100).at(1), cost.curve(100).at(8)) == (True, 1.0, 3.0)
    assert Cost(CostCurve((1, 8), (10.0, 30.0))).is_checked


def test_leaving_plain_steps_pays_for_the_way_back() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0), switch_seconds=4.5))
    changes = [cost.prices(0).change]  # a text begins
    for n_rows in (1, 8, 4, 1):
        cost.decoded(n_rows)
        changes.append(cost.prices(0).change)
    assert changes == [9.0, 9.0, 4.5, 4.5, 9.0]


def test_the_cost_grows_with_n_past_between_the_measured_places_and_beyond() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0)), CostCurve((1, 8), (2.0, 5.0)))
    # To one row attention adds 1 s in 1408 tokens, to eight rows 3 s.
    # Places have 256 tokens: 640 is the middle of the third, 512 tokens on.
    assert cost.curve(600).at(8) == pytest.approx(2 + 3 * 512 / 1408)
    assert cost.curve(2944).at(1) == pytest.approx(1 + 2)


def test_a_damaged_file_of_costs_is_measured_anew(tiny_model: Path, cache_folder: Path) -> None:
    with Model(tiny_model) as model, Context(model, EXACT) as context:
        curve = measure_cost(context, sizes=(1, 2, 4), n_past=20, budget_seconds=0.05)
        assert tuple(curve.sizes) == (1, 2, 4)
        assert 0 < curve.at(1) <= min(curve.at(2), curve.at(4))
        cost = Cost(curve)
        path = learnt.file_for(context)
        learnt.save(path, {"states": {"other": {"a": [2.0]}}}, cost, "", {"suffix": [1.0]})
        kept = learnt.load(path)
        found = learnt.cost(kept)
        assert found is not None and found.near.seconds == pytest.approx(curve.seconds)
        assert learnt.states(kept, "") == {"suffix": [1.0]}
        assert learnt.states(kept, "other") == {"a": [2.0]}
        for broken in ({}, {"cost": {"near": {"sizes": "?"}}}, {"cost": 7, "states": 7}):
            assert learnt.states(broken, "") == {}
            assert learnt.cost(broken) is None
        # Other tests save in the same folder.
        files = (cache_folder / "learnt").glob("*.json")
        (file,) = [file for file in files if json.loads(file.read_text()) == kept]
        for content in (b"{", b"\xff", b"[" * 100_000, b'{"cost": 1' + b"0" * 5000 + b"}"):
            file.write_bytes(content)
            assert learnt.load(path) == {}
    assert list((cache_folder / "learnt").glob("*.partial")) == []


def test_what_was_damaged_on_disk_is_measured_anew_or_left_out(tmp_path: Path) -> None:
    cost = Cost(CostCurve((1, 2, 4), (1.0, 2.0, 3.0)), CostCurve((1, 4), (2.0, 6.0)))
    learnt.save(tmp_path / "learnt.json", {}, cost, "", {})
    kept = learnt.load(tmp_path / "learnt.json")
    found = learnt.cost(kept)
    assert found is not None and found.curve(128).at(4) == pytest.approx(3.0, abs=0.2)
    odd_seconds: list[Any] = [[1.0], [1.0, 1.1, "1.2"], [1.0, 0.0, 1.0], [8.0, math.nan, 8.0]]
    odd_seconds += [[1.0, 2.0, math.inf], [1.0, 2.0, 1e200], [1e-320, 2.0, 3.0]]
    for name, values in (
        ("seconds", odd_seconds),
        ("sizes", [[1, 2, 10**12], [1, 2.5, 4]]),
        ("switch_seconds", [-1.0, "0"]),
    ):
        for value in values:
            near = {**kept["cost"]["near"], name: value}
            assert learnt.cost({"cost": {**kept["cost"], "near": near}}) is None, value
    assert learnt.cost({"cost": {**kept["cost"], "far": []}}) is None
    states = {"suffix": ["1.0"], "recycling": [True], "draft": [-2, 0.5], "mtp": [math.inf], "x": 1}
    states |= {"jacobi": [-1e200], "eagle": [1e200]}
    assert learnt.states({"states": {"": states}}, "") == {"draft": [-2, 0.5]}


class Machine:
    """Simulates decodes and returns how long they would take.

    The first row costs 1 ms, each further one 0.5. A change of size costs ``switch`` seconds, and
    the decode after it ``record`` if the size repeats; the first use of a size costs ``load``. The
    two decodes after more than 8 rows cost ``cold`` times as much; ``busy`` lists how much slower
    it is for 200 decodes each, in turn; ``stalls`` are the numbers of decodes that take 20 ms more.
    """

    def __init__(
        self, switch: float = 0.0, cold: float = 1.0, busy: tuple[float, ...] = (1.0,),
        record: float = 0.0, load: float = 0.0, stalls: Container[int] = (),
) -> None:  # fmt: skip
        self.switch, self.cold, self.busy = switch, cold, busy
        self.record, self.load, self.stalls = record, load, stalls
        self.sizes: list[int] = []
        self.seconds = 0.0

    def decode(self, n: int) -> float:
        seconds = 1e-3 * (0.5 + 0.5 * n)
        if n == 1 and any(size > 8 for size in self.sizes[-2:]):
            seconds *= self.cold
        if self.sizes and self.sizes[-1] != n:
            seconds += self.switch
        elif len(self.sizes) == 1 or self.sizes[-2:-1] not in ([], [n]):
            seconds += self.record
        if n not in self.sizes:
            seconds += self.load
        seconds *= self.busy[len(self.sizes) // 200 % len(self.busy)]
        if len(self.sizes) in self.stalls:
            seconds += 20e-3
        self.sizes.append(n)
        self.seconds += seconds
        return seconds


MACHINES = {
    "quiet": Machine(),
    "changes-cost": Machine(switch=4e-4),
    "cold-caches": Machine(cold=2.0),
    "busy-at-times": Machine(busy=(1.0, 3.0, 1.0, 1.5)),
    "all": Machine(switch=4e-4, cold=2.0, busy=(1.0, 2.0)),
    "records-graphs": Machine(switch=2e-4, record=2e-3, load=2e-3),
    "stalls": Machine(stalls=range(14, 3000, 29)),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_relative_row_costs_are_accurate_on_a_busy_machine(machine: Machine) -> None:
    curve = measure_curve(machine.decode, SIZES, budget_seconds=3.0)
    assert tuple(curve.sizes) == SIZES
    ratios = [curve.at(n) / curve.at(1) for n in SIZES]
    assert ratios == pytest.approx([0.5 + 0.5 * n for n in SIZES], rel=0.02)
    switch = machine.switch + machine.record
    assert curve.switch_seconds / curve.at(1) == pytest.approx(switch / 1e-3, rel=0.05)


def test_a_single_row_takes_the_most_common_time_and_stalls_make_no_batch_free() -> None:
    assert measure_curve(Machine().decode).at(1) == pytest.approx(1e-3)
    busy = Machine(busy=(2.0, 2.0, 2.0, 1.0))
    assert measure_curve(busy.decode).at(1) == pytest.approx(2e-3)
    # One or both of the rows that four rows may be compared with, in the only round.
    for stalls, seconds in (((11,), (1e-3, 1.5e-3, 2.5e-3)), ((11, 12), (1e-3, 1.5e-3, 1e-3))):
        curve = measure_curve(Machine(stalls=stalls).decode, (1, 2, 4), budget_seconds=0.04)
        assert curve.seconds == pytest.approx(seconds)


def test_measuring_stays_within_its_time_budget_and_reports_each_size() -> None:
    enough, little = Machine(), Machine()
    measure_curve(enough.decode, SIZES, budget_seconds=0.7)
    assert 0.35 < enough.seconds < 0.75
    curve = measure_curve(little.decode, SIZES, budget_seconds=0.03)
    assert tuple(curve.sizes) == (1, 2, 4, 8, 16)
    assert curve.at(64) == pytest.approx(32.5e-3)  # extrapolated with the same slope
    reported: list[int] = []
    measure_curve(Machine().decode, (1, 2, 4), progress=reported.append)
    assert reported == [1, 2, 4]
    curve = measure_curve(Machine().decode, (1,), budget_seconds=0.1)
    assert tuple(curve.sizes) == (1,)
    assert curve.at(1) == pytest.approx(1e-3)


def test_a_large_model_is_measured_up_to_where_rows_cost_time() -> None:
    """Eight billion parameters on a few cores: a few rows cost no more than reading the weights."""
    sizes: list[int] = []

    def decode(n: int) -> float:
        sizes.append(n)
        return max(0.120, 0.015 * n)

    curve = measure_curve(decode, SIZES, budget_seconds=0.5)
    assert sizes == [1, 1, 1, 1, 1, 2, 4, 8, 16]  # 1.2 seconds
    assert [curve.at(n) for n in (1, 4, 8)] == [0.120] * 3
    assert curve.at(64) == pytest.approx(0.960)


@pytest.mark.parametrize(
    ("row_seconds", "n_past"),
    [(0.06, 16), (0.004, 62), (0.001, 192)],  # billions of parameters, hundreds of millions, few
)
def test_the_text_decoded_before_measuring_is_as_long_as_time_allows(
    row_seconds: float, n_past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class Target:
        n_ctx, n_batch, n_vocab = 1024, 256, 100

        def decode(self, rows: Rows) -> None:
            clock[0] += row_seconds * len(rows)

        def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
            pass

    monkeypatch.setattr("batching.llama.timing.perf_counter", lambda: clock[0])
    target: Any = Target()
    assert affordable_text(target, 192, seconds=0.25) == n_past


class Clocked:
    """A context with a clock that decodes alone advance: 1 ms a row, and 1 µs for each token before
    it. ``prompt`` seconds pass for rows without output. In the first ``busy`` seconds, batches take
    six times as long, and the process has half of a processor."""

    n_batch, n_vocab, n_rewind, n_threads = 512, 100, NO_LIMIT, 1
    model = SimpleNamespace(n_layer=1, n_host_layers=1)

    n_ctx, can_repeat, prompt, fails, busy = 2048, True, 0.0, False, 0.0

    def __init__(self, **different: Any) -> None:
        self.__dict__.update(different)
        self.now = self.processor = 0.0

    def decode(self, rows: Rows) -> Clocked:
        n_past, is_busy = rows.positions[0], self.now < self.busy
        seconds = len(rows) * (1e-3 + 1e-6 * n_past) if any(rows.outputs) else self.prompt
        if is_busy and len(rows) > 1:
            seconds *= 6
        self.now += seconds
        self.processor += seconds / 2 if is_busy else seconds
        return self

    def repeat(self, n_tokens: int) -> None:
        if self.fails:
            raise ContextError("no copy")

    def argmax(self, row: int) -> int:
        return row

    def seq_rm(self, seq_id: int, first: int, end: int) -> None:
        pass


def use_clock(monkeypatch: pytest.MonkeyPatch, context: Clocked) -> None:
    for module in (cost_measured, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: context.now)
    monkeypatch.setattr(cost_measured, "process_time", lambda: context.processor)


@pytest.mark.parametrize(("busy", "seconds"), [(0.0, 3.3), (1.0, 6.6), (99.0, 9.9)])
def test_a_disturbed_measurement_is_repeated_up_to_three_times_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy: float, seconds: float
) -> None:
    context: Any = Clocked(busy=busy)
    use_clock(monkeypatch, context)
    cost = measure(context, budget_seconds=3.0)
    assert cost.near.at(8) / cost.near.at(1) == pytest.approx(8)  # it seems 48 if disturbed
    assert context.now == pytest.approx(seconds, rel=0.3)
    learnt.save(tmp_path / "learnt.json", {}, cost, "", {})
    assert ("cost" in learnt.load(tmp_path / "learnt.json")) == (busy < 99.0)


@pytest.mark.parametrize(
    ("context", "is_measured"),
    [
        (Clocked(), True),
        (Clocked(n_ctx=1536), False),
        (Clocked(can_repeat=False), False),
        (Clocked(prompt=9.0), True),
        (Clocked(fails=True), False),
    ],
)
def test_the_cost_far_along_is_measured_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, context: Any, is_measured: bool
) -> None:
    use_clock(monkeypatch, context)
    cost = measure(context, budget_seconds=6.0)
    assert (cost.far is not None) == is_measured
    if is_measured:
        assert cost.curve(3968).at(8) == pytest.approx(8 * (1e-3 + 1e-6 * 3968))


def test_copies_of_a_text_stand_for_reading_it_again(tmp_path: Path) -> None:
    """With one layer, a token's key and value depend on nothing before it."""
    tokens = [5, 80, 33, 120, 9, 64, 77, 18]
    model_file = write_tiny_gguf(tmp_path / "one-layer.gguf", n_layer=1)
    logits = []
    with Model(model_file) as model, Context(model, EXACT) as context:
        assert context.can_repeat
        for n_read in (8, 20):
            read = [*tokens, *tokens, *tokens][:n_read]
            context.decode(text_rows(read, 0, [False] * n_read))
            if n_read == 8:
                context.repeat(20)
            logits.append(context.decode(text_rows([7], 20, [True])).logits(0).copy())
            context.seq_rm(-1, 0, -1)
    assert logits[0] == pytest.approx(logits[1], rel=1e-3, abs=1e-4)
