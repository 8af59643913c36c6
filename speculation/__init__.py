"""Lossless speculative decoding on llama.cpp.

    from speculation import Engine

    with Engine.load("model.gguf") as engine:
        for token in engine.chat("Hello!"):
            print(token.text, end="")

``engine`` is the interface for users, bench and app; ``decode`` has the decode loop, ``methods/``
one file per method and their table.
"""

from batching.errors import SpeculationError
from batching.llama.context_params import ContextParams
from speculation.chat.detokenizer import Token
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.methods import METHODS, parse_method
from speculation.sampling import SamplingParams
from speculation.stats import Stats
from speculation.text import Text

__all__ = [
    "METHODS",
    "ContextParams",
    "Engine",
    "Method",
    "SamplingParams",
    "SpeculationError",
    "Stats",
    "Text",
    "Token",
    "parse_method",
]
