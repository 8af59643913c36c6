"""Error messages that refer to settings by the labels of the page's fields."""

from __future__ import annotations

from batching.errors import SpeculationError

FIELDS = {
    "model": "“Model”",
    "draft_model": "“Draft model” under Model",
    "heads": "“Drafting heads” under Model",
    "n_ctx": "“Context” under Model",
    "n_gpu_layers": "--gpu-layers",
    "kv_type": "--kv-type",
}


def in_page(error: SpeculationError) -> str:
    """The message of an error, for the page."""
    return error.worded(FIELDS)
