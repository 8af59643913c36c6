"""The chat in the browser and the endpoint.

``page`` is the Gradio page, ``store`` keeps its chats, ``api`` has the routes, and ``worker`` runs
the engine in a process of its own. Between the two processes pass the messages of
``worker.messages`` alone.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read by gradio when it is imported
