"""Prompts, and runs and results that were never measured."""

from __future__ import annotations

from typing import Any

from speculation.bench.results import Difference, Results, Run
from speculation.meter import Stats

PROMPTS = (
    '{"question_id": "c1", "category": "cats", "turns": ["the cat saw a dog", "and a cat"]}\n'
    '{"question_id": "d1", "category": "dogs", "prompt": "a dog, a cat and the dog"}\n'
)
PHASES = {"draft": 0.01, "build": 0.02, "decode": 0.4, "verify": 0.03, "commit": 0.04}


def run(
    method: str, prompt_id: str, n_tokens: int, seconds: float, *, category: str = "chat",
    first_difference: Difference | None = None, **stats: Any,
) -> Run:  # fmt: skip
    """A run of a first step with one token, and of ten steps with ``n_tokens`` in ``seconds``."""
    usual: dict[str, Any] = {
        "n_prompt": 5,
        "n_tokens": n_tokens + 1,
        "n_first": 1,
        "n_steps": 11,
        "n_rows": 20,
        "prefill_seconds": 0.25,
        "decode_seconds": seconds,
        "phase_seconds": PHASES,
    }
    counted = Stats(**{**usual, **stats})
    tokens = list(range(counted.n_tokens))
    return Run(method, prompt_id, category, 0, tokens, "length", counted, first_difference)


def results(*runs: Run, **more: Any) -> Results:
    fields: dict[str, Any] = {
        "model": {"file": "m.gguf", "name": "M <7B>", "description": "llama 7B"},
        "device": {"devices": ["cpu: C"], "threads": 2},
        "settings": {"repeat": 1, "raw": False},
        "started": "2026-01-31T12:30:00+00:00",
        "complete": True,
    }
    return Results(**{**fields, **more}, runs=list(runs))
