"""Console output: unencodable characters are replaced, and errors name settings by their flags."""

from __future__ import annotations

import io
import sys

from batching.errors import SpeculationError

FLAGS = {
    "model": "--model",
    "draft_model": "--draft-model",
    "heads": "--heads",
    "n_ctx": "--ctx",
    "n_gpu_layers": "--gpu-layers",
    "device": "--device",
    "kv_type": "--kv-type",
    "parallel": "--parallel",
    "keep_texts": "--keep-texts",
}


def replace_unencodable() -> None:
    """Print ``?`` for characters that a console or pipe cannot encode.

    Texts and file names can have any character; a Windows pipe encodes about 200.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def worded(error: Exception) -> str:
    """The error's message, with settings named by their command-line flags."""
    return error.worded(FLAGS) if isinstance(error, SpeculationError) else str(error)
