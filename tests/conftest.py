"""Fixtures: a tiny random model, made once a session, and an engine for each module."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculation.engine import Engine
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use all cores for whole folders, where pytest-xdist is installed."""
    option = config.option
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # which starts no workers of its own
    if is_worker or option.usepdb or getattr(option, "numprocesses", 0) is not None:
        return
    if not config.args or any(Path(arg.split("::")[0]).is_dir() for arg in config.args):
        option.numprocesses = "auto"
        option.dist = "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "app" / "browser"):
            item.add_marker("browser")
    for asked_for in ("software_gpu", "agents"):
        if asked_for not in config.option.markexpr:
            left = [item for item in items if item.get_closest_marker(asked_for) is not None]
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item not in left]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("train") is not None:
        pytest.importorskip("torch").set_num_threads(1)  # other tests run beside it


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, which tests are about."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Costs measured in tests stay out of the user's cache, and chats out of the user's data;
    started programs inherit this."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPECULATION_CACHE", str(folder))
        patched.setenv("XDG_DATA_HOME", str(folder / "data"))
        yield folder


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the embedding of ``tiny_model``: the two sometimes agree."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "draft.gguf", n_layer=1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a tiny random GGUF with a chat template and a context of 512."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, of which heads in llama.cpp's formats read the last three's inputs"""
    return write_tiny_gguf(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_draft: Path) -> Iterator[Engine]:
    """``tiny_model`` with its draft, in a context of equal floats; a module may have its own."""
    with Engine.load(tiny_model, EXACT, draft_model=tiny_draft) as engine:
        yield engine
