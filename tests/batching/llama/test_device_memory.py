"""How many layers go to devices, by their free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batching.errors import OutOfMemory
from batching.gguf.reader import GGUFFile
from batching.llama.device_memory import CacheSize, choose_layers
from tests.support.tiny_gguf import write_tiny_gguf


class Fake:
    """A device with memory: free bytes, all bytes."""

    name = "CUDA0"

    def __init__(self, free: int, total: int = 2**40) -> None:
        self.memory = free, total


def with_room(n_bytes: int) -> Fake:
    """A device with so much room for layers: an eighth of it stays free."""
    return Fake(next(free for free in range(n_bytes, 2 * n_bytes) if free - free // 8 == n_bytes))


def chosen(files: Any, *devices: Any, n: int | None = None, cache: CacheSize | None = None) -> Any:
    return choose_layers(files, devices, n, cache)


def test_as_many_layers_go_to_the_devices_as_fit_with_their_cache(tmp_path: Path) -> None:
    files = [GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", n_layer=4))]
    layer = sum(files[0].n_bytes(name) for name in files[0].tensors if name.startswith("blk.0."))
    last = files[0].n_bytes("output.weight") + files[0].n_bytes("output_norm.weight")
    assert chosen(files, with_room(last + 2 * layer)) == 3
    assert chosen(files, with_room(last + 2 * layer - 1)) == 2
    both = with_room(last + 2 * layer).memory[0]
    assert chosen(files, Fake(both - 5000), Fake(5000)) == 3
    assert chosen(files, with_room(last - 1)) == 0
    assert chosen(files, with_room(last + 4 * layer)) is None
    # 32 wide, so keys and values of a token take 64 values of 4 bytes in each layer.
    cache = CacheSize(1000, "f32")
    assert chosen(files, with_room(last + 3 * layer + 2 * 256_000), cache=cache) == 3
    assert chosen(files, with_room(last + 3 * layer + 3 * 256_000), cache=cache) == 4
    # Nothing is known of this machine's, and without devices there is nothing to choose.
    assert chosen(files, Fake(0, 0)) is None
    assert chosen(files) is None
    assert chosen(files, n=3) == 3


def test_layers_that_do_not_fit_are_refused_with_the_number_that_does(tmp_path: Path) -> None:
    files = [GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", n_layer=4))]
    layer = sum(files[0].n_bytes(name) for name in files[0].tensors if name.startswith("blk.0."))
    assert chosen(files, Fake(100 * layer), n=2) == 2
    with pytest.raises(OutOfMemory) as caught:
        chosen(files, Fake(2 * layer), n=4)
    assert "4 layers of " in str(caught.value)
    assert "but CUDA0 has 0.0 GiB free; lower n_gpu_layers to 1, or leave it out" in str(
        caught.value
    )
    assert caught.value.available == 2 * layer
