"""The ctypes edge, the only place that imports ``llama_cpp``.

Models, contexts, batches, outputs, samplers, grammars and hardware. C return codes become
exceptions here. Knows nothing about methods, flags or pages. ``private_api`` has what depends on
the llama.cpp version.
"""
