"""What a command line prints: anything a console can show, and errors in the words of its flags."""

from __future__ import annotations

import sys

from batching.errors import SpeculationError

FLAGS = {
    "model": "--model",
    "draft_model": "--draft-model",
    "heads": "--heads",
    "n_ctx": "--ctx",
    "n_gpu_layers": "--gpu-layers",
    "kv_type": "--kv-type",
}


def print_anything() -> None:
    """Have ``?`` printed for what a console or pipe cannot show: texts, and names of files, are
    anything, and on Windows a pipe has some 200 characters."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def worded(error: Exception) -> str:
    """What to print of an error, with settings called by their flags."""
    return error.worded(FLAGS) if isinstance(error, SpeculationError) else str(error)
