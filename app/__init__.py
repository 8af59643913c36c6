"""The chat in the browser.

``backend`` is the one way to the engine, and could as well lead into another process; ``chat``
holds a conversation and what happens to it; ``render`` turns it into HTML; ``ui`` has the Gradio
blocks; ``page.css`` and ``page.js`` are what the browser gets besides.
"""
