"""Token trees, rows and the llama.cpp edge.

This package turns a tree of tokens into one ``llama_decode`` and keeps the KV cache right
afterwards. It knows nothing of any speculative method, and it is the only package that imports
``llama_cpp``. ``tree`` and ``rows`` are pure; ``context`` and ``sampler`` hold the native edge.
"""

import os

# NumPy's own threads wait by spinning, on the very cores that llama.cpp computes on: with two cores
# a head's matrices made a decode after them six times as long. It takes effect where NumPy was not
# imported before, and whoever sets the variable decides.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
