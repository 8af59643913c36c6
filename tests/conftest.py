"""Fixtures: a tiny random model, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a tiny random GGUF with a chat template and a context of 512."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")
