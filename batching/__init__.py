"""Token trees, rows and the llama.cpp edge.

This package turns a tree of tokens into one ``llama_decode`` and keeps the KV cache right
afterwards. It knows nothing of any speculative method, and it is the only package that imports
``llama_cpp``. ``tree`` and ``rows`` are pure; ``context`` and ``sampler`` hold the native edge.
"""
