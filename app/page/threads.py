"""How the event loop waits for the store, and for what makes HTML of a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.store import Store

T = TypeVar("T")
_replies = ThreadPoolExecutor(1, "replies")  # one, as they take the interpreter from the rest


async def in_store(store: Store, work: Callable[[], T]) -> T:
    """What ``work`` returns: calls of the store, in one transaction. Raises StoreError."""
    return await asyncio.wrap_future(store.submit(work))


async def while_shown(work: Callable[[], T]) -> T:
    """What ``work`` returns, which makes HTML or figures of a reply."""
    return await asyncio.get_running_loop().run_in_executor(_replies, work)
