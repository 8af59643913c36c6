"""The hand-written facts about llama.cpp's internals match the installed version."""

from __future__ import annotations

import llama_cpp
import pytest

from batching.errors import UnsupportedModel
from batching.llama import private_api


def message(installed: str) -> str:
    return (
        f"batching/llama/private_api.py was checked with llama-cpp-python "
        f"{private_api.CHECKED_WITH}, and {installed} is installed: compare its lists and "
        f"functions with that version's source, then set CHECKED_WITH"
    )


def test_the_lists_cover_the_installed_version() -> None:
    installed = llama_cpp.__version__
    assert private_api.is_covered(installed), message(installed)
    if installed != private_api.CHECKED_WITH:
        pytest.skip(message(installed))


def test_what_was_not_checked_is_not_covered_and_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert private_api.is_covered("0.3.99")
    assert not private_api.is_covered("0.4.0")
    monkeypatch.setattr(llama_cpp, "__version__", "0.4.0")
    name = "llama_get_embeddings_nextn"
    with pytest.raises(
        UnsupportedModel,
        match=rf"llama-cpp-python 0\.4\.0 may have changed {name}, so heads .* cannot draft; "
        rf"install version {private_api.CHECKED_WITH}, or use another method",
    ):
        private_api.internal(name)


@pytest.mark.parametrize("name", private_api.FUNCTIONS)
def test_the_installed_library_exports_every_function_we_call(name: str) -> None:
    assert callable(private_api.internal(name))
