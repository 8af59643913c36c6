"""Several texts whose heads or draft model draft together: each text is what it would be alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from batching.errors import CacheFull
from batching.llama.context import Context
from batching.rows import Rows
from batching.slots import Slots
from batching.together import Coroutine, Running, Work, advance, run
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from tests.speculation.methods.test_eagle import write_head as write_eagle_head
from tests.speculation.methods.test_medusa import random_weights as medusa_weights
from tests.speculation.methods.test_medusa import write_heads as write_medusa_heads
from tests.speculation.methods.test_redrafter import random_weights as redrafter_weights
from tests.speculation.methods.test_redrafter import write_head as write_redrafter_head
from tests.support.exact import EXACT
from tests.support.mtp_gguf import (
    write_assistant_gguf,
    write_gemma_gguf,
    write_mtp_gguf,
    write_mtp_gguf_with_kv,
)
from tests.support.tiny_dflash import write_counting_gguf, write_counting_head
from tests.support.tiny_eagle3 import write_tiny_eagle3
from tests.support.tiny_gguf import write_tiny_gguf


def states(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_tiny_gguf(folder / "target.gguf", n_layer=4)
    heads = [
        write_eagle_head(folder / "eagle.gguf", target),
        write_tiny_eagle3(folder / "eagle3.gguf"),
        write_medusa_heads(folder / "medusa.gguf", target, medusa_weights()),
        write_redrafter_head(folder / "redrafter.gguf", target, redrafter_weights()),
    ]
    methods = ["eagle-1", "eagle-2", "eagle-3", "medusa", "redrafter", "draft:p_min=0.02", "auto"]
    return target, heads, methods


def blocks(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_counting_gguf(folder / "target.gguf", influence=0.08)
    return target, [write_counting_head(folder / "head.gguf")], ["dflash", "dflash:top_k=4", "auto"]


def mtp(folder: Path) -> tuple[Path, list[Path], list[str]]:
    return write_mtp_gguf_with_kv(folder / "mtp.gguf"), [], ["mtp", "mtp:top_k=3,p_min=0", "auto"]


def hybrid(folder: Path) -> tuple[Path, list[Path], list[str]]:
    return write_mtp_gguf(folder / "mtp.gguf"), [], ["mtp:p_min=0", "mtp:depth=2,p_min=0", "auto"]


def attached(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_gemma_gguf(folder / "gemma.gguf")
    return target, [write_assistant_gguf(folder / "a.gguf", target)], ["mtp:p_min=0", "auto"]


@pytest.mark.parametrize("written", [states, blocks, mtp, hybrid, attached])
def test_texts_with_heads_draft_together_and_are_what_they_would_be_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: object
) -> None:
    target, heads, methods = written(tmp_path)  # type: ignore[operator]
    together: Counter[tuple[bool, int]] = Counter()  # by target or not, and texts in the batch
    decode = Slots.decode

    def counted(self: Slots, parts: object, watch: object = None) -> object:
        together[self is target_slots, len(parts)] += 1  # type: ignore[arg-type]
        return decode(self, parts, watch)  # type: ignore[arg-type]

    rng, found = random.Random(5), []
    draft = target if len(heads) > 1 else None
    with Engine.load(target, EXACT, heads=heads, draft_model=draft, parallel=4) as engine:
        target_slots = engine._scheduler.places.slots
        monkeypatch.setattr(Slots, "decode", counted)
        endless = dict.fromkeys(engine.model.ends, -math.inf)
        requests = [
            {
                "prompt": [rng.randrange(5, 200) for _ in range(rng.randrange(1, 90))],
                "method": methods[i % len(methods)],
                "sampling": SamplingParams(logit_bias=endless, temperature=0.7 * (i % 2), seed=i),
                "max_tokens": rng.randrange(5, 40),
            }
            for i in range(24)
        ]
        running = [engine.submit(**request) for request in requests]
        found = [one.run() for one in running]
    with Engine.load(target, EXACT) as alone:
        for request, ours in zip(requests, found, strict=True):
            plain = alone.generate(**{**request, "method": "ar"}).run()
            assert ours.token_ids == plain.token_ids, request
    drafted = [one.stats.n_drafted for one in found]
    assert sum(n > 0 for n in drafted) >= 12
    assert sum(n for (is_target, n_texts), n in together.items() if not is_target and n_texts > 1)
    assert together[True, 4]


def test_a_draft_model_reads_a_prefix_of_several_texts_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [7 + i % 90 for i in range(200)]
    with Engine.load(tiny_model, EXACT, draft_model=tiny_model, parallel=4) as engine:
        n_read: list[int] = []
        decode = Context.decode

        def counted(self: Context, rows: Rows, watch: object = None) -> object:
            if self is engine.draft:
                n_read.append(rows.outputs.count(False))
            return decode(self, rows, watch)  # type: ignore[arg-type]

        monkeypatch.setattr(Context, "decode", counted)
        first = engine.submit([*prompt, 5], method="draft", max_tokens=200)
        next(first)
        assert sum(n_read) == 200
        second = engine.submit([*prompt, 6], method="draft", max_tokens=9).run()
        assert second.stats.n_reused == 200
        assert sum(n_read) == 200
        first.run()


def test_an_error_in_shared_work_ends_only_those_who_do_not_expect_it() -> None:
    def fail(parts: Sequence[int]) -> list[int]:
        raise CacheFull("full")

    def double(parts: Sequence[int]) -> list[int]:
        calls.append(list(parts))
        return [2 * part for part in parts]

    def careful() -> Coroutine[None]:
        try:
            yield Work(fail, 1)
        except CacheFull:
            results.append((yield Work(double, 5)))

    def careless() -> Coroutine[None]:
        yield Work(fail, 2)

    def other() -> Coroutine[None]:
        results.append((yield Work(double, 3)))
        results.append((yield Work(double, 4)))

    calls: list[list[int]] = []
    results: list[int] = []
    running = [Running(careful()), Running(careless()), Running(other())]
    while any(one.work for one in running):
        advance(running)
    assert calls == [[3], [5, 4]]
    assert results == [6, 10, 8]
    assert [type(one.error) for one in running] == [type(None), CacheFull, type(None)]
    with pytest.raises(CacheFull):
        run(careless())
