"""Errors in the words of the page: settings are called by their fields."""

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
    """What to show of an error."""
    return error.worded(FIELDS)
