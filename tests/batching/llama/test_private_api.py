"""The hand-written facts about llama.cpp's internals match the installed version."""

from __future__ import annotations

import llama_cpp
import pytest

from batching.llama import private_api


def message(installed: str) -> str:
    return (
        f"batching/llama/private_api.py was checked with llama-cpp-python "
        f"{private_api.CHECKED_WITH}, and {installed} is installed: compare its lists and "
        f"functions with that version's source, then set CHECKED_WITH"
    )


def is_covered(installed: str) -> bool:
    return installed.split(".")[:2] == private_api.CHECKED_WITH.split(".")[:2]


def test_the_lists_cover_the_installed_version() -> None:
    installed = llama_cpp.__version__
    assert is_covered(installed), message(installed)
    if installed != private_api.CHECKED_WITH:
        pytest.skip(message(installed))


def test_another_minor_version_is_not_covered() -> None:
    assert is_covered("0.3.99")
    assert not is_covered("0.4.0")


@pytest.mark.parametrize("name", private_api.FUNCTIONS)
def test_the_installed_library_exports_every_function_we_call(name: str) -> None:
    assert callable(private_api.internal(name))
