"""The page's own threads, so that nothing else that waits keeps its chats waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.api.errors import ApiError
from app.store import NoSuchChat, StoreError

T = TypeVar("T")
NO_SUCH = 404  # the status of a chat or turn that is not there
_chats = ThreadPoolExecutor(4, "page")
_replies = ThreadPoolExecutor(1, "replies")  # one, as they take the interpreter from the rest


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns, which may wait for the disk. Raises ApiError for its StoreError."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_chats, work)
    except NoSuchChat as error:
        raise ApiError(str(error), NO_SUCH) from error
    except StoreError as error:
        raise ApiError(str(error), 507) from error


async def while_shown(work: Callable[[], T]) -> T:
    """What ``work`` returns, which makes HTML or figures of a reply."""
    return await asyncio.get_running_loop().run_in_executor(_replies, work)
