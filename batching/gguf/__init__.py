"""GGUF files: header and tensors read and written, models in several files, and what a file says
that llama.cpp cannot run. Pure Python and NumPy: it knows neither ``llama_cpp`` nor
``batching.llama``. Lists of what one llama.cpp version can do are passed in.
"""
