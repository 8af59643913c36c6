"""Greedy choices made where the output matrix is: a token comes back instead of its logits.

llama.cpp runs a sampler as part of a decode's graph if each sequence of a row has one. It plans its
graphs anew after each change of them, and each makes a graph larger, so only sequences that are
used get one, when a decode needs it. Part of the ctypes edge.
"""

from __future__ import annotations

import llama_cpp.llama_cpp as C

from batching.llama.library import exported
from batching.llama.model import Model
from batching.llama.native import Native, NativeContext
from batching.rows import Rows


class DeviceSampling:
    """Greedy samplers for the sequences of a context.

    wanted  whether the tokens are enough, without logits, in the next decodes
    is_on   whether the last decode had samplers
    """

    def __init__(self, model: Model) -> None:
        # On a CPU the logits are in main memory anyway. Of a worker, llama.cpp fetches each row's
        # token with a request of its own, but the logits of all rows with one. And Vulkan aborts
        # over a row of logits that does not begin at a multiple of 256 bytes.
        on_device = model.n_host_layers < model.n_layer
        is_remote = any(device.is_remote for device in model.devices)
        is_aligned = model.n_vocab * 4 % 256 == 0
        has_function = exported("llama_set_sampler") is not None
        self.is_possible = on_device and not is_remote and is_aligned and has_function
        self.wanted = self.is_on = False

    def prepare(self, context: NativeContext, rows: Rows) -> None:
        """Set or remove samplers for a decode of ``rows``, as ``wanted``."""
        chains = context.chains
        if not any(rows.outputs):
            return
        self.is_on = self.wanted
        if not self.is_on:
            for seq_id in chains:
                C.llama_set_sampler(context.handle, seq_id, None)
            chains.clear()
            return
        # Most rows share one range.
        several = {id(ids): ids for ids in rows.seq_ids}.values()
        for seq_id in {seq_id for ids in several for seq_id in ids} - chains.keys():
            chains[seq_id] = chain = _greedy_chain()
            # False: this device cannot do it.
            if not C.llama_set_sampler(context.handle, seq_id, chain.handle):
                self.is_possible = self.wanted = False
                self.prepare(context, rows)
                return

    @staticmethod
    def choice(context: NativeContext, row: int) -> int:
        """The choice after a row of the last batch."""
        token: int = C.llama_get_sampled_token_ith(context.handle, row)
        return token


def _greedy_chain() -> Native:
    """A chain of its own for each sequence: llama.cpp prepares it once."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
    return Native(chain, C.llama_sampler_free)
