"""The chat in the browser.

``backend`` is the one way to the engine, and could as well lead into another process: nothing but
``messages`` crosses it. Behind it ``jobs`` take turns and ``loading`` holds the model. On this side
``chat`` holds a conversation and what happens to it; ``render`` turns it into HTML; ``fields`` are
what the user can set; ``ui`` is the page; ``page/`` is what the browser gets besides.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read by gradio when it is imported
