"""A server of the page, whose replies the test writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page.chats import Chats
from tests.support.page import Page, Written, served


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Page, Written, Chats]]:
    backend = Written()
    with served(backend, tmp_path / "chats.db") as site:
        yield site.page(), backend, site.chats
