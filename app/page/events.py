"""How the page's events reach Python: none shows Gradio's own progress or stands in an API."""

from __future__ import annotations

from typing import Any

_PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
QUICK: dict[str, Any] = {**_PRIVATE, "queue": False}
# The backend has the queue, and tells who waits.
SLOW: dict[str, Any] = {**_PRIVATE, "concurrency_limit": None}
