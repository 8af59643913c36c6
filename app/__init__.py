"""The chat in the browser: ``page`` is its Gradio page, ``worker`` runs the engine.

Only the dataclasses of ``worker.messages`` pass between the two, so the engine could run in another
process.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read by gradio when it is imported
