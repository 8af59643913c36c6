"""Options for Gradio events: no progress display of Gradio's, no public API."""

from __future__ import annotations

from typing import Any

_PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
QUICK: dict[str, Any] = {**_PRIVATE, "queue": False}
# Gradio's queue does not limit these: the backend has its own and reports the wait.
SLOW: dict[str, Any] = {**_PRIVATE, "concurrency_limit": None}
