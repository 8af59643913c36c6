"""GGUF files: reader, writer, split models, and checks for files llama.cpp cannot run.

Pure Python and NumPy; knows neither ``llama_cpp`` nor ``batching.llama``.
"""
