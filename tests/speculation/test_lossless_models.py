"""Every method gives plain decoding's text on tiny models: with each kind of head and of target,
for each way of sampling, when a text goes on from another, and beside others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from batching.slots import Slots
from speculation.engine import Engine
from speculation.reply import Reply
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT, PROMPT, endless
from tests.support.tiny_gguf import N_TINY, write_hybrid_gguf, write_tiny_gguf
from tests.support.tiny_heads import (
    EAGLE_3,
    HEADS,
    Made,
    attached,
    blocks,
    hybrid,
    matrix,
    mtp,
    write_counting_gguf,
    write_counting_head,
    write_heads,
    write_mtp_gguf,
)

SOME = {"tokens": sorted(random.Random(0).sample(range(N_TINY), 100))}
THIRD = np.arange(3, N_TINY, 3)
YARN = {
    "eagle3.rope.scaling.type": "yarn",
    "eagle3.rope.scaling.factor": 4.0,
    "eagle3.rope.scaling.original_context_length": 16,
}
WINDOW = {
    "dflash.attention.sliding_window": 6,
    "dflash.attention.sliding_window_pattern": [True, False],
}


class Case(NamedTuple):
    """A model with its heads.

    methods  each with the most rows of a step, which most steps have; 0 if it depends on the text
    accepts  drafts of each that are right at least, in greedy decoding
    """

    write: Callable[[Path], Made]
    methods: dict[str, int]
    accepts: int = 0


def wrote(
    write: Callable[..., Path], more: Callable[[Path, Path], list[Path]] | None = None
) -> Callable[[Path], Made]:
    """Writes a target with ``write``, and the heads of ``more``."""

    def made(folder: Path) -> Made:
        target = write(folder / "target.gguf")
        return target, more(folder, target) if more is not None else [], []

    return made


def heads(
    write: Callable[..., Path] | None = None, /, **kinds: dict[str, Any]
) -> Callable[..., Made]:
    """A target, by default of four layers, with heads of these kinds and settings."""
    named = {kind.replace("_", "-"): settings for kind, settings in kinds.items()}
    return wrote(
        write or partial(write_tiny_gguf, n_layer=4),
        lambda folder, target: write_heads(folder, target, named),
    )


ANY_HEADS = {
    "eagle-1": 26,
    "eagle-1:choices=0.0.0/1.1/2/3,window=4": 8,
    "eagle-2": 25,
    "eagle-2:depth=3,top_k=2,nodes=5,window=0": 6,
    "eagle-3": 25,
    "eagle-3:top_k=1,depth=4,nodes=4": 5,
    "eagle-3:depth=3,top_k=2,nodes=5,window=0": 6,
    "eagle-3:nodes=100,top_k=12": 0,  # the target's context is recreated for wide trees
    "medusa": 16,
    "medusa:nodes=6": 7,
    "redrafter": 0,
    "redrafter:beams=1,length=2": 3,
    "dflash": 8,
    "dflash:depth=3": 4,
    "dflash:top_k=3,nodes=12,depth=5": 13,
    "dflash:window=0,p_min=0.1": 0,
    "auto:sources=medusa+redrafter+eagle+eagle-3": 0,
    "auto:sources=dflash": 0,
}
SOME_HEADS = {"eagle-1": 26, "eagle-3": 25, "medusa:nodes=6": 7, "redrafter:beams=1,length=2": 3}
MTPS = dict.fromkeys(("mtp", "mtp:p_min=0", "mtp:p_min=0,top_k=3", "mtp:window=0"), 0)
CHAINS = {"dflash": 9, "dflash:top_k=3,nodes=12,depth=5": 0, "eagle-3": 0, "eagle-3:window=0": 0}
LAYERS = {"layers": (0, 1, 2)}
hybrid_heads = partial(heads, eagle_3=LAYERS, dflash={**LAYERS, "block_size": 12})
CASES = {
    "a draft model": Case(
        wrote(write_tiny_gguf),
        dict.fromkeys(
            (
                "draft:p_min=0,p_path=0 draft:width=3,nodes=10,p_min=0.01,draft_max=4 "
                "recycling:nodes=20 prompt-lookup suffix:branches=4,p_min=0.1 suffix "
                "suffix:branches=6,p_min=0.05 suffix:memory=off jacobi lookahead "
                "lookahead:window=5,ngram=4,guesses=3 auto:sources=draft+suffix auto"
            ).split(),
            0,
        ),
    ),
    "heads": Case(heads(**{kind: {} for kind in HEADS}), ANY_HEADS),
    "heads of some tokens": Case(
        heads(
            eagle={**SOME, "kind": "q8_0"},
            eagle_3=EAGLE_3["speculators"],
            medusa={**SOME, "n_blocks": 2},
            redrafter=SOME,
            dflash={"tensors": {"d2t": THIRD, "output.weight": matrix(len(THIRD), 32)}},
        ),
        {**SOME_HEADS, "dflash": 8, "dflash:top_k=3,nodes=12,depth=5": 13},
    ),
    "narrow, windows": Case(
        heads(eagle_3=EAGLE_3["narrower than the target"], dflash={"metadata": WINDOW}),
        {"eagle-3": 25, "dflash": 8},
    ),
    "yarn, own embeddings": Case(
        heads(
            eagle_3={"metadata": YARN},
            dflash={"tensors": {"token_embd.weight": matrix(N_TINY, 32)}},
        ),
        {"eagle-3": 25, "dflash": 8},
    ),
    "causal blocks": Case(
        heads(dflash={"metadata": {"dflash.attention.causal": True}}), {"dflash": 8}
    ),
    "for a target that sees": Case(
        heads(dflash={"metadata": {"dflash.rope.dimension_sections": [4, 0, 0, 0]}}), {"dflash": 8}
    ),
    "lfm2": Case(hybrid_heads(write_hybrid_gguf), CHAINS),
    "qwen35": Case(hybrid_heads(write_mtp_gguf), CHAINS),
    "counting": Case(
        blocks,
        {
            "dflash": 5,
            "dflash:depth=2": 3,
            "dflash:window=0": 0,
            "dflash:window=3": 5,
            "dflash:top_k=3,nodes=9": 10,
            "dflash:top_k=12,nodes=100": 0,
        },
        accepts=6,
    ),
    "counting hybrid": Case(
        wrote(
            partial(write_counting_gguf, influence=0.02, hybrid=True),
            lambda folder, target: [write_counting_head(folder / "head.gguf")],
        ),
        {"dflash": 5, "auto": 0},
        accepts=6,
    ),
    "mtp hybrid": Case(hybrid, MTPS, accepts=6),
    "mtp kv": Case(mtp, MTPS, accepts=6),
    "mtp attached": Case(attached, MTPS, accepts=6),
}
WORDS = SamplingParams(grammar='root ::= ("the " | "cat " | "dog ")+')
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"endless": 0.0},
    "seeded": {"endless": 0.8},
    "one token": {"endless": 0.0, "prompt": "a", "max_tokens": 20},
    "grammar": {"sampling": WORDS},
}
NAME = {"properties": {"name": {"type": "string"}}}
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalised greedy": {"repeat_penalty": 1.3, "presence_penalty": 0.5},
    "truncated": {"temperature": 1.2, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "typical and xtc": {
        "temperature": 1.0,
        "seed": 2,
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
    },
    "dry": {"temperature": 0.5, "seed": 3, "dry_multiplier": 0.8, "repeat_penalty": 1.1},
    "mirostat 1": {"temperature": 1.0, "seed": 4, "mirostat": 1},
    "mirostat 2": {"temperature": 1.0, "seed": 5, "mirostat": 2},
    "biased": {"temperature": 1.0, "seed": 6, "logit_bias": {270: 4.0, 271: float("-inf")}},
    "seeded grammar": {"temperature": 1.0, "seed": 8, "grammar": "root ::= [a-f]+"},
    "regular expression": {"regex": "(the |cat |dog )+"},
    "seeded schema": {"temperature": 1.0, "seed": 9, "json_schema": NAME},
    "late end": {"temperature": 1.5, "seed": 10, "min_tokens": 55},
}
MORE: dict[str, dict[str, Any]] = {
    name: {"sampling": SamplingParams(**sampling), "max_tokens": 60}
    for name, sampling in SAMPLERS.items()
}
SENTENCE = SamplingParams(grammar='root ::= "the cat saw a dog"')
MORE["stop"] = {"sampling": SENTENCE, "stop": "saw"}
LONG = [5 + i % 200 for i in range(440)]
MORE["full context"] = {"endless": 0.0, "prompt": LONG, "max_tokens": None}


def texts(engine: Engine, case: Case, way: dict[str, Any]) -> dict[str, Reply]:
    """The replies by method, which are those of plain decoding."""
    settings: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, **way}
    if "endless" in settings:
        temperature = settings.pop("endless")
        penalty = 1.1 if temperature else 1.0
        settings["sampling"] = replace(endless(engine, temperature), repeat_penalty=penalty)
    plain = engine.generate(method="ar", **settings).run()
    assert plain.stats.n_steps == plain.stats.n_tokens
    found = {method: engine.generate(method=method, **settings).run() for method in case.methods}
    for method, text in found.items():
        assert text.token_ids == plain.token_ids, method
        assert (text.text, text.finish_reason) == (plain.text, plain.finish_reason), method
    return {"ar": plain, **found}


Load = Callable[..., Engine]


@pytest.fixture(scope="module", params=CASES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_draft: Path
) -> Iterator[tuple[Case, Engine, Load]]:
    case: Case = CASES[request.param]
    target, heads, _ = case.write(tmp_path_factory.mktemp("models"))
    draft = tiny_draft if request.param == "a draft model" else None
    is_part = request.param.startswith("mtp")
    load = partial(Engine.load, target, EXACT, heads=heads, draft_model=draft, mtp=is_part)
    with load() as engine:
        yield case, engine, load


@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_that_of_plain_decoding(loaded: tuple[Case, Engine, Load], way: str) -> None:
    case, engine, _ = loaded
    found = texts(engine, case, WAYS[way])
    for method, most in case.methods.items():
        stats = found[method].stats
        assert max(stats.rows_histogram) <= 1 + engine.context.n_rewind, method
        if way == "greedy" and not method.startswith("auto"):
            assert stats.n_drafted >= stats.n_accepted >= case.accepts, method
            assert stats.n_drafted > 0, method
        if way == "greedy" and most:
            assert max(stats.rows_histogram) == most, method
            # Not in the first step; in the last ones few tokens are left.
            assert stats.rows_histogram[most] >= stats.n_steps / 2, method


@pytest.mark.parametrize("way", MORE)
def test_a_text_of_any_sampler_is_that_of_plain_decoding(engine: Engine, way: str) -> None:
    plain = texts(engine, CASES["a draft model"], MORE[way])["ar"]
    if way == "stop":
        assert (plain.text, plain.finish_reason) == ("the cat ", "stop")
    if way == "full context":
        assert plain.finish_reason == "context"
        assert plain.stats.n_prompt + plain.stats.n_tokens == engine.context.n_ctx + 1


def test_a_text_goes_on_from_that_of_another_method(loaded: tuple[Case, Engine, Load]) -> None:
    case, engine, _ = loaded
    found: list[tuple[dict[str, Any], Reply]] = []
    text = engine.model.tokenize(PROMPT)
    methods = [*case.methods] * 4
    for n, method in enumerate(methods[: max(5, len(methods) // 4)]):
        sampling = endless(engine, 0.7 * (n % 2))
        request: dict[str, Any] = {"prompt": text, "sampling": sampling, "max_tokens": 20}
        reply = engine.generate(method=method, **request).run()
        found.append((request, reply))
        kept = text[:-30] if n % 4 == 3 else [*text, *reply.token_ids]
        text = [*kept, 270 + n]
    assert max(reply.stats.n_reused for _, reply in found) > 20
    assert sum(reply.stats.n_drafted for _, reply in found) > 10
    for request, reply in found:
        engine.cache.truncate(0)
        plain = engine.generate(method="ar", **request).run()
        assert reply.token_ids == plain.token_ids, reply.request.method


BESIDE = ("a draft model", "heads", "counting", "mtp hybrid", "mtp kv", "mtp attached")


@pytest.mark.parametrize("loaded", BESIDE, indirect=True)
def test_texts_draft_together_and_are_what_they_would_be_alone(
    loaded: tuple[Case, Engine, Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, alone, load = loaded
    methods = [*case.methods]
    together: Counter[tuple[bool, int]] = Counter()  # by target or not, and texts in the batch
    decode, rng = Slots.decode, random.Random(5)

    def counted(self: Slots, parts: Any, *rest: Any) -> object:
        together[self is target_slots, len(parts)] += 1
        return decode(self, parts, *rest)

    requests: list[dict[str, Any]] = [
        {
            "prompt": [rng.randrange(5, 200) for _ in range(rng.randrange(1, 90))],
            "sampling": endless(alone, 0.7 * (i % 2), seed=i),
            "max_tokens": rng.randrange(5, 40),
        }
        for i in range(24)
    ]
    with load(parallel=4) as engine:
        target_slots = engine._scheduler.places.slots
        monkeypatch.setattr(Slots, "decode", counted)
        chosen = [methods[i % len(methods)] for i in range(24)]
        running = [engine.submit(method=m, **r) for m, r in zip(chosen, requests, strict=True)]
        found = [one.run() for one in running]
    for request, ours in zip(requests, found, strict=True):
        plain = alone.generate(method="ar", **request).run()
        assert ours.token_ids == plain.token_ids, ours.request.method
    assert sum(ours.stats.n_drafted > 0 for ours in found) >= 8
    assert sum(n for (is_target, n_texts), n in together.items() if not is_target and n_texts > 1)
    assert together[True, 4]
