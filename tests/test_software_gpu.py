"""What a GPU user does, on two emulated GPUs. ``sh tools/software_gpu`` runs these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter, OutOfMemory
from batching.llama.context import ContextParams
from batching.llama.devices import Device, devices, gpus
from speculation.engine import Engine
from tests.support.exact import EXACT, PROMPT
from tests.support.experts import check_experts
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_heads import blocks, hybrid, mtp, states

BUNDLED = ROOT / "models" / "speculation-14m-q8_0.gguf"
METHODS = (
    "auto",
    "prompt-lookup",
    "suffix:branches=3,p_min=0.05",
    "recycling:nodes=12",
    "jacobi",
    "lookahead:window=3,ngram=3,guesses=3",
    "draft:p_min=0.02",
    "draft:width=3,nodes=10,p_min=0.01,draft_max=4",
)
pytestmark = pytest.mark.software_gpu


def test_there_are_emulated_gpus() -> None:
    assert [device.name for device in gpus()] == ["Vulkan0", "Vulkan1"]
    assert "llvmpipe" in gpus()[0].description


def check_methods(engine: Engine, prompt: str | list[int], methods: Sequence[str]) -> None:
    """Each method writes the text of plain decoding."""
    plain = engine.generate(prompt, method="ar", max_tokens=40).run().token_ids
    for method in methods:
        assert engine.generate(prompt, method=method, max_tokens=40).run().token_ids == plain, (
            method
        )


@pytest.mark.parametrize("n_gpu_layers", [None, 2, 1, 0])
@pytest.mark.parametrize("draft_device", [None, "none"])
def test_each_method_writes_the_text_of_plain_decoding(
    n_gpu_layers: int | None, draft_device: str | None, tiny_model: Path, tiny_draft: Path
) -> None:
    devices: dict[str, Any] = {"n_gpu_layers": n_gpu_layers, "draft_device": draft_device}
    with Engine.load(tiny_model, EXACT, draft_model=tiny_draft, **devices) as engine:
        check_methods(engine, PROMPT, METHODS)


@pytest.mark.parametrize("kind", [states, blocks, mtp, hybrid])
@pytest.mark.parametrize("n_gpu_layers", [None, 2])
def test_heads_on_the_device_draft_for_the_text_of_plain_decoding(
    kind: Callable[[Path], tuple[Path, list[Path], list[str]]],
    n_gpu_layers: int | None,
    tmp_path: Path,
) -> None:
    model, heads, methods = kind(tmp_path)
    with Engine.load(model, EXACT, heads=heads, n_gpu_layers=n_gpu_layers) as engine:
        own = [method for method in methods if not method.startswith("draft")]  # has no draft model
        check_methods(engine, [5 + i % 20 for i in range(30)], own)


def test_texts_written_together_are_what_they_would_be_alone(
    tiny_model: Path, tiny_draft: Path
) -> None:
    prompts = [PROMPT, "a dog", "the cat sat on the mat"]
    with Engine.load(tiny_model, EXACT) as engine:
        alone = [engine.generate(p, method="ar", max_tokens=30).run().token_ids for p in prompts]
    with Engine.load(tiny_model, EXACT, draft_model=tiny_draft, parallel=4) as engine:
        for method in ("ar", "auto", "draft:p_min=0.02"):
            found = engine.generate_batch(prompts, method=method, max_tokens=30)
            assert [one.token_ids for one in found] == alone, method


@pytest.mark.parametrize(
    ("kv_type", "flash_attn"),
    [
        *(("f16", attn) for attn in ("auto", "on", "off")),
        ("q8_0", "on"),
        ("q5_1", "on"),
        ("q4_0", "auto"),
    ],
)
def test_flash_attention_and_a_smaller_cache_work(kv_type: str, flash_attn: str) -> None:
    params = ContextParams(n_ctx=256, kv_type=kv_type, flash_attn=flash_attn, n_threads=1)
    with Engine.load(BUNDLED, params) as engine:
        assert engine.generate(PROMPT, method="recycling", max_tokens=6).run().stats.n_tokens == 6


def test_devices_can_be_chosen(tiny_model: Path) -> None:
    choices = {
        None: ["Vulkan0", "Vulkan1"],
        "Vulkan1": ["Vulkan1"],
        "Vulkan1,Vulkan0": ["Vulkan1", "Vulkan0"],
        "none": [],
    }
    texts = set()
    for device, chosen in choices.items():
        with Engine.load(tiny_model, EXACT, device=device) as engine:
            assert [one.name for one in engine.model.devices] == chosen
            texts.add(engine.generate(PROMPT, method="recycling", max_tokens=20).run().text)
    assert len(texts) == 1
    wrong = "there is no device CUDA7; device can be none, Vulkan0 .*, Vulkan1 "
    with pytest.raises(InvalidParameter, match=wrong):
        Engine.load(tiny_model, EXACT, device="CUDA7")


def test_a_context_that_the_device_cannot_hold_is_refused_with_the_way_out(tmp_path: Path) -> None:
    free, total = next(device for device in devices() if device.is_gpu).memory
    assert 0 < free <= total
    n_ctx = free // 150  # bytes a cell: 64 on the host, at least 512 on the devices
    model = write_tiny_gguf(tmp_path / "long.gguf", n_ctx=n_ctx)
    with pytest.raises(OutOfMemory, match=r"GiB on Vulkan0 .*lower n_ctx"):
        Engine.load(model, replace(EXACT, n_ctx=n_ctx, flash_attn="off"), n_gpu_layers=99)


def test_as_many_layers_as_fit_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "memory", property(lambda _: (19_000_000, 2**30)))
    with Engine.load(BUNDLED, EXACT, device="Vulkan0") as engine:
        assert engine.model.n_host_layers == 13
        on_both = engine.generate(PROMPT, method="recycling", max_tokens=20).run().text
    with Engine.load(BUNDLED, EXACT, device="none") as engine:
        assert engine.generate(PROMPT, method="ar", max_tokens=20).run().text == on_both
    monkeypatch.setattr(Device, "memory", property(lambda _: (6_000_000, 2**30)))
    with pytest.raises(OutOfMemory, match="but Vulkan0 has 0.0 GiB free; lower n_gpu_layers to 1"):
        Engine.load(BUNDLED, EXACT, device="Vulkan0", n_gpu_layers=8)


def test_experts_in_main_memory_leave_the_device_and_do_not_change_the_text() -> None:
    check_experts({}, {"device": "Vulkan0"}, "Vulkan")
