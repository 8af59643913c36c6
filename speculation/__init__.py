"""Lossless speculative decoding on llama.cpp.

    from speculation import Engine

    with Engine.load("model.gguf") as engine:
        for token in engine.chat("Hello!"):
            print(token.text, end="")

``engine`` is the interface for users, bench and app; ``step`` has the decode loop, ``methods/``
one file per method and their table.
"""

from batching.errors import SpeculationError
from batching.llama.context_params import ContextParams
from speculation.chat.detokenizer import Token
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.meter import Stats
from speculation.methods import METHODS, parse_method
from speculation.reply import Reply
from speculation.sampling import SamplingParams

__all__ = [
    "METHODS",
    "ContextParams",
    "Engine",
    "Method",
    "Reply",
    "SamplingParams",
    "SpeculationError",
    "Stats",
    "Token",
    "parse_method",
]
