"""How the event loop waits for the store, and for what makes HTML of a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from app.api.errors import ApiError
from app.store import NoSuchChat, Store, StoreError

T = TypeVar("T")
NO_SUCH = 404  # the status of a chat or turn that is not there
_replies = ThreadPoolExecutor(1, "replies")  # one, as they take the interpreter from the rest


async def in_store(store: Store, work: Callable[[], T]) -> T:
    """What ``work`` returns: calls of the store, in one transaction. Raises ApiError for its
    StoreError."""
    with as_api_errors():
        return await asyncio.wrap_future(store.submit(work))


@contextmanager
def as_api_errors() -> Iterator[None]:
    """Raise ApiError for a StoreError."""
    try:
        yield
    except NoSuchChat as error:
        raise ApiError(str(error), NO_SUCH) from error
    except StoreError as error:
        raise ApiError(str(error), 507) from error


async def while_shown(work: Callable[[], T]) -> T:
    """What ``work`` returns, which makes HTML or figures of a reply."""
    return await asyncio.get_running_loop().run_in_executor(_replies, work)
