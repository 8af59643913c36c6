"""The ctypes edge, the only place that imports ``llama_cpp``: models, contexts, batches, outputs,
samplers, grammars and the machine. C return codes become exceptions here. It knows nothing of
token trees, methods, flags or pages. What depends on one llama.cpp version is in ``private_api``.
"""
