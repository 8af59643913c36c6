"""Token trees, rows and the llama.cpp edge.

Turns a tree of tokens into one ``llama_decode`` and keeps the KV cache consistent afterwards.
Knows nothing about speculative methods. The only package that imports ``llama_cpp``, and only in
``batching.llama``; ``tree``, ``rows`` and ``cache`` are pure.
"""

import os

# OpenBLAS threads spin while idle and take cores from llama.cpp: on two cores, a head's matrix
# products made the next decode six times slower. Works only if NumPy is not imported yet; a value
# the user has set wins.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
