"""The highest logits of a row, chosen where the output matrix is, so that not all are copied.

llama.cpp runs a sampler as part of a decode's graph if each sequence of a row has one. It plans its
graphs anew after each change of them, and each makes a graph larger, so only sequences that are
used get one, when a decode needs it. Part of the ctypes edge.
"""

from __future__ import annotations

from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.llama.library import exported
from batching.llama.model import Model
from batching.logits import Highest
from batching.rows import Rows
from batching.tree import NO_LIMIT


class DeviceSampling:
    """Samplers for the sequences of a context, which keep the likeliest tokens.

    wanted  logits of a row that the next decodes must give; NO_LIMIT = all, without samplers
    is_on   whether the last decode had samplers
    """

    def __init__(self, handle: Any, model: Model) -> None:
        self._handle = handle
        self._chains: dict[int, Any] = {}  # by sequence
        self._n = 0  # of the likeliest tokens, that they give
        # On a CPU the logits are in main memory anyway.
        on_device = model.n_host_layers < model.n_layer
        self.is_possible = on_device and exported("llama_set_sampler") is not None
        self.wanted = NO_LIMIT
        self.is_on = False

    def prepare(self, rows: Rows) -> None:
        """Set or remove samplers for a decode of ``rows``, as ``wanted``."""
        if not any(rows.outputs):
            return
        self.is_on = self.wanted < NO_LIMIT
        if self.wanted > self._n:
            for seq_id in self._chains:
                C.llama_set_sampler(self._handle, seq_id, None)
            self.close()
            self._n = self.wanted if self.is_on else 0
        if not self.is_on:
            return
        # Most rows share one range.
        several = {id(ids): ids for ids in rows.seq_ids}.values()
        for seq_id in {seq_id for ids in several for seq_id in ids} - self._chains.keys():
            self._chains[seq_id] = chain = _chain(self._n)
            if not C.llama_set_sampler(self._handle, seq_id, chain):  # this device cannot do it
                self.is_possible, self.wanted = False, NO_LIMIT
                self.prepare(rows)
                return

    def choice(self, row: int) -> int:
        """The likeliest token after a row of the last batch."""
        if self._n == 1:
            token: int = C.llama_get_sampled_token_ith(self._handle, row)
            return token
        logits, tokens = self._found(row)
        peak = max(logits)
        return min(token for token, logit in zip(tokens, logits, strict=True) if logit == peak)

    def highest(self, row: int) -> Highest:
        """The tokens of a row's highest logits, and these, in no order."""
        logits, tokens = self._found(row)
        return np.array(tokens), np.array(logits, np.float32)

    def _found(self, row: int) -> tuple[list[float], list[int]]:
        n, handle = self._n, self._handle
        return (
            C.llama_get_sampled_logits_ith(handle, row)[:n],
            C.llama_get_sampled_candidates_ith(handle, row)[:n],
        )

    def close(self) -> None:
        """Free the samplers; the context must not refer to them any more."""
        for chain in self._chains.values():
            C.llama_sampler_free(chain)
        self._chains = {}


def _chain(n: int) -> Any:
    """A chain that gives the ``n`` likeliest tokens; each sequence needs one of its own."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    link = C.llama_sampler_init_greedy() if n == 1 else C.llama_sampler_init_top_k(n)
    C.llama_sampler_chain_add(chain, link)
    return chain
