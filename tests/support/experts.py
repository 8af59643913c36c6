"""A model whose experts are in main memory, while devices have the rest of its layers."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from batching.llama.devices import CacheSize, Device, Placement
from batching.llama.log import recent_log
from batching.llama.model import Model
from speculation.engine import Engine
from speculation.system.computed_by import computed_by
from tests.support.exact import EXACT, PROMPT
from tests.support.tiny_gguf import write_tiny_gguf


def check_experts(two: dict[str, Any], one: dict[str, Any], name: str) -> None:
    """Experts leave a device without a change of the text. ``two`` and ``one`` are settings with as
    many devices, of the names ``name``0 and ``name``1."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(Path(folder) / "experts.gguf", n_layer=3, n_expert=32)
        plain = texts(path, n_cpu_moe=0, **one)[1][0]

        def weights(settings: dict[str, Any], n_cpu_moe: int | None = None) -> list[float]:
            """Their MiB on the devices."""
            cache = CacheSize(512, "f32")
            placement = Placement.of(n_cpu_moe=n_cpu_moe, **settings)
            with Model(path, placement=placement, cache=cache):
                found = re.findall(rf"{name}\S+ model buffer size = +([\d.]+) MiB", recent_log())
            return sorted(float(size) for size in found)  # in the order of their addresses

        # The experts of a layer: 32 times three matrices of 32 x 64 F32 values, 0.75 MiB.
        for n_cpu_moe, size in ((0, 2.35), (1, 1.6), (3, 0.1)):
            assert weights(one, n_cpu_moe) == pytest.approx([size], abs=0.02)
            assert texts(path, n_cpu_moe=n_cpu_moe, **one)[1] == [plain, plain]
        # By themselves, as many as do not fit.
        for settings, free, n_cpu_moe in ((one, 2_500_000, 2), (two, 2_100_000, 1)):
            with patch.object(Device, "memory", (free, 2**30)):
                told, found = texts(path, **settings)
            assert (
                f"3 of 3 layers without the experts of the first {n_cpu_moe}, and the CPU" in told
            )
            assert found == [plain, plain]
        free_of = {f"{name}0": 1_200_000, f"{name}1": 3_000_000}
        with patch.object(Device, "memory", property(lambda one: (free_of[one.name], 2**30))):
            assert weights(two) == pytest.approx([0.77, 1.58], abs=0.02)


def texts(path: Path, **settings: Any) -> tuple[str, list[list[int]]]:
    """What computes a model, and its texts without drafts and with many."""
    with Engine.load(path, EXACT, **settings) as engine:
        return computed_by(engine.model), [
            engine.generate(PROMPT, method=method, max_tokens=40).run().token_ids
            for method in ("ar", "recycling")
        ]
