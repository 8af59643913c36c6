"""ContextParams: size, threads and KV cache type of a context, with the limits llama.cpp has."""

from __future__ import annotations

from dataclasses import dataclass

from batching.errors import InvalidParameter, check_ranges

MAX_SEQUENCES = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_SLOTS = MAX_SEQUENCES - 1  # one sequence may be needed for copies
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; ggml aborts on more
MAX_REWIND = 16  # with more, llama.cpp aborts on graphs of medium-sized LFM2 models
MAX_CELLS = 2**31 - 256
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q5_1": 7, "q4_0": 2}  # ggml_type
BF16 = 30
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type
_RANGES = (
    ("n_ctx", 0, MAX_CELLS),
    ("n_batch", 1, MAX_CELLS),
    ("n_seq_max", 1, MAX_SEQUENCES),
    ("n_slots", 1, MAX_SLOTS),
    ("n_rewind", 0, MAX_REWIND),
    ("n_threads", 1, MAX_THREADS),
    ("n_ubatch", 1, MAX_CELLS),
)


@dataclass(frozen=True)
class ContextParams:
    """How a context is set up.

    n_ctx       KV cache cells; 0 = the model's training length
    n_batch     rows per decode, at least n_seq_max; prompts are decoded in chunks of this size
    n_seq_max   sequences; up to 64 are free, 256 cost 45 µs per decode (measured on 2 cores);
                a recurrent or hybrid model gets n_slots instead
    n_slots     texts decoded at a time. A recurrent or hybrid model, which cannot drop branches,
                gets one sequence for each, with a state of its own
    n_rewind    drafts a recurrent or hybrid model can roll back, if llama.cpp supports it for the
                model; each costs a copy of every slot's state
    n_threads   None = physical cores
    kv_type     type of the KV cache: f32, f16, q8_0, q5_1 or q4_0
    flash_attn  on, off, or auto = on; on a GPU, if supported
    n_ubatch    rows computed at a time; None = n_batch
    exact       a row attends to the same values in the same order, whatever else is decoded: if
                there are several texts, each has cells of its own. ``exact.equal_rows`` tells
                how many rows at a time then have the same logits as one
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_seq_max: int = 64
    n_slots: int = 1
    n_rewind: int = 8
    n_threads: int | None = None
    kv_type: str = "f16"
    flash_attn: str = "auto"
    n_ubatch: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        for name, value, choices in (
            ("kv_type", self.kv_type, KV_TYPES),
            ("flash_attn", self.flash_attn, FLASH_ATTN),
        ):
            if value not in choices:
                raise InvalidParameter(
                    f"{{{name}}} is {value!r}; give one of {', '.join(choices)}", settings=(name,)
                )
        if self.exact and (self.kv_type == "f32" or self.flash_attn == "off"):
            raise InvalidParameter(
                "{exact} needs flash attention and a KV cache of f16 or less; change {kv_type} or "
                "{flash_attn}",
                settings=("exact", "kv_type", "flash_attn"),
            )
        if is_quantized(self.kv_type) and self.flash_attn == "off":
            raise InvalidParameter(
                f"a {self.kv_type} KV cache needs flash attention; change {{kv_type}} or "
                "{flash_attn}",
                settings=("kv_type", "flash_attn"),
            )


def is_quantized(kv_type: str) -> bool:
    """Whether a KV cache of this type needs flash attention."""
    return kv_type.startswith("q")
