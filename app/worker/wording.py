"""Error messages that refer to settings as the user knows them: as fields of the page, or flags."""

from __future__ import annotations

from batching.errors import SpeculationError
from speculation.system.console import FLAGS

FIELDS = {
    "model": "“Model”",
    "draft_model": "“Draft model” under Model",
    "heads": "“Drafting heads” under Model",
    "n_ctx": "“Context” under Model",
    "n_gpu_layers": "--gpu-layers",
    "device": "--device",
    "kv_type": "--kv-type",
    "parallel": "--parallel",
    "keep_texts": "--keep-texts",
}


def with_labels(error: SpeculationError) -> str:
    """The message of an error, for the page."""
    return error.worded(FIELDS)


def with_flags(error: SpeculationError) -> str:
    """The message of an error, for the endpoint and the terminal."""
    return error.worded(FLAGS)
