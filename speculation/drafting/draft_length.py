"""Lengths of drafts whose batches llama.cpp decodes fast."""

from __future__ import annotations


def round_length(length: int) -> int:
    """Round down to 1, 3, 7, 15, …: with the root, a power of two rows.

    llama.cpp reuses its compute graph between batches of the same size; a change costs as much as
    one or two rows.
    """
    return (1 << (length + 1).bit_length() - 1) - 1
