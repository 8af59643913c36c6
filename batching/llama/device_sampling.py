"""Greedy choices made where the output matrix is: a token comes back instead of its logits.

llama.cpp runs a sampler as part of a decode's graph if each sequence has one. Every change of them
makes it plan its graphs anew, so a context changes only when a decode needs the other kind.
Part of the ctypes edge.
"""

from __future__ import annotations

from typing import Any

import llama_cpp.llama_cpp as C

from batching.llama.library import exported
from batching.llama.model import Model


class DeviceSampling:
    """Greedy samplers for all sequences of a context.

    wanted  whether decodes from now on may give choices without logits …
    is_on   … and whether the samplers are set
    """

    def __init__(self, handle: Any, model: Model, n_seq_max: int) -> None:
        self._handle = handle
        self._n_seq_max = n_seq_max
        self._chains: list[Any] = []
        # On a CPU the logits are in main memory anyway.
        self.is_possible = (
            exported("llama_set_sampler") is not None and model.n_host_layers < model.n_layer
        )
        self.wanted = self.is_on = False

    def switch(self) -> None:
        """Set or remove the samplers, as ``wanted``."""
        chains = [_greedy_chain() if self.wanted else None for _ in range(self._n_seq_max)]
        done = [C.llama_set_sampler(self._handle, i, chain) for i, chain in enumerate(chains)]
        self.close()
        self._chains = [chain for chain in chains if chain is not None]
        self.is_on = self.wanted
        if self.is_on and not all(done):  # this device cannot do it
            self.is_possible = self.wanted = False
            self.switch()

    def choice(self, row: int) -> int:
        """The choice after a row of the last batch."""
        token: int = C.llama_get_sampled_token_ith(self._handle, row)
        return token

    def close(self) -> None:
        """Free the samplers; the context must not refer to them any more."""
        for chain in self._chains:
            C.llama_sampler_free(chain)
        self._chains = []


def _greedy_chain() -> Any:
    """A chain of its own for each sequence: llama.cpp prepares it once."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
    return chain
