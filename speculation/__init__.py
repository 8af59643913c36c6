"""Lossless speculative decoding on llama.cpp.

    from speculation import Engine

    with Engine.load("model.gguf") as engine:
        for token in engine.chat("Hello!"):
            print(token.text, end="")

``engine`` is the interface for users, bench and app; ``decode`` has the decode loop, ``drafters/``
one file per method, ``methods`` the table of methods.
"""

from speculation.engine import Engine, Generation, Token
from speculation.methods import METHODS, Method, parse_method
from speculation.parallel import ParallelEngine
from speculation.sampling import SamplingParams
from speculation.stats import Stats

__all__ = [
    "METHODS",
    "Engine",
    "Generation",
    "Method",
    "ParallelEngine",
    "SamplingParams",
    "Stats",
    "Token",
    "parse_method",
]
