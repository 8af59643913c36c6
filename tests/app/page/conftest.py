"""A server of the page, whose replies the test writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page.chats import Chats
from tests.support.page import Page, Site, Written, served


@pytest.fixture
def backend() -> Written:
    return Written()


@pytest.fixture
def site(backend: Written, tmp_path: Path) -> Iterator[Site]:
    with served(backend, tmp_path / "chats.db") as site:
        yield site


@pytest.fixture
def page(site: Site) -> Page:
    return site.page()


@pytest.fixture
def chats(site: Site) -> Chats:
    return site.chats
