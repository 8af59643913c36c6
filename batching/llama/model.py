"""A GGUF model: loading, vocabulary, metadata. Part of the llama.cpp edge."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from batching.errors import (
    InvalidParameter,
    ModelError,
    ModelFileMissing,
    NotGGUF,
    OutOfMemory,
    TruncatedGGUF,
    UnsupportedModel,
)
from batching.gguf.mtp import MtpLayers, find_mtp_layers
from batching.gguf.unsupported import TEXT_MODEL, check_model_file, check_types
from batching.llama.charset import CONTROL, Charset, limited_charset, token_pattern
from batching.llama.device_memory import CacheSize, choose_layers
from batching.llama.devices import ANYWHERE, Placement, joined
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import clear_log, initialise, recent_log
from batching.llama.private_api import (
    DUAL_INPUT_HEADS,
    EXPOSES_MTP_STATE,
    HEAD_ARCHITECTURES,
    LIMITS,
    MTP_GRAPHS,
)
from batching.llama.text_model import not_a_text_model
from batching.tree import NO_LIMIT

ALL_LAYERS = 999

_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"), (1, ""))


class Model:
    """A loaded GGUF: weights, vocabulary and metadata.

    Close it after its contexts, or use it as a context manager around them.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF, UnsupportedModel, OutOfMemory or ModelError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        placement: Placement = ANYWHERE,
        cache: CacheSize | None = None,
        mtp: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load ``path``. ``mtp`` also loads the model's multi-token-prediction layers, if any.

        If ``placement`` does not say how many layers go to the devices, as many do as fit together
        with their part of ``cache``.

        ``progress`` is called with the share of the weights loaded, 0 to 1; an exception from it
        stops the load.
        """
        self.path = Path(path)
        check_file(self.path)
        files = check_model_file(self.path, LIMITS)
        initialise()
        clear_log()
        params = C.llama_model_default_params()
        self.placement = placement
        self.devices = placement.chosen()
        n_gpu_layers = choose_layers(files, self.devices, placement.n_gpu_layers, cache)
        params.n_gpu_layers = ALL_LAYERS if n_gpu_layers is None else n_gpu_layers
        native_devices = placement.native(self.devices)  # must outlive the call below
        params.devices = ctypes.cast(native_devices, ctypes.c_void_p)
        params.load_mtp = mtp

        stopped: list[BaseException] = []

        def on_progress(share: float, _user_data: int | None) -> bool:
            try:
                deliver()
                if progress is not None:
                    progress(share)
            except BaseException as error:  # must not propagate through llama.cpp
                stopped.append(error)
            return not stopped

        callback = C.llama_progress_callback(on_progress)  # must outlive the call below
        params.progress_callback = callback
        handle = None
        try:
            with deferred_interrupts() as deliver:
                handle = C.llama_model_load_from_file(os.fsencode(self.path), params)
                if stopped:
                    raise stopped[0]
        except BaseException:
            if handle:
                C.llama_model_free(handle)
            raise
        if not handle:
            raise _load_error(self.path)
        self._handle: Any = handle
        atexit.register(self.close)  # Metal aborts at exit if anything is not freed
        self._vocab: Any = C.llama_model_get_vocab(handle)
        self.n_gpu_layers: int = params.n_gpu_layers
        self.n_vocab: int = C.llama_vocab_n_tokens(self.vocab)
        self.own_template: str | None = None
        self.n_embd: int = C.llama_model_n_embd(handle)
        self.n_embd_out: int = C.llama_model_n_embd_out(handle)  # width of hidden states
        architecture = self.metadata("general.architecture")
        self.dual_input = architecture in DUAL_INPUT_HEADS
        self.is_head = architecture in HEAD_ARCHITECTURES
        self.n_layer: int = C.llama_model_n_layer(handle)
        # Multi-token prediction: the model exposes the layers' input state; number of layers
        # loaded and runnable; the file has no other layers.
        self.exposes_mtp_state = architecture in EXPOSES_MTP_STATE
        mtp_layers = MtpLayers(0, mtp_only=False)
        if C.llama_model_n_layer_nextn(handle):
            mtp_layers = find_mtp_layers(self.path, MTP_GRAPHS)
        self.n_mtp = mtp_layers.n_layers if mtp else 0
        self.is_mtp_only = mtp_layers.mtp_only
        self.n_ctx_train: int = C.llama_model_n_ctx_train(handle)
        # llama.cpp aborts past the end of learned position embeddings, as GPT-2 has.
        learned_positions = any("position_embd.weight" in file.tensors for file in files)
        self.n_positions = self.n_ctx_train if learned_positions else NO_LIMIT
        self.n_params: int = C.llama_model_n_params(handle)
        self.n_bytes: int = C.llama_model_size(handle)
        # Only a pure KV cache can drop any part of a sequence.
        self.can_rewind = not (
            C.llama_model_is_recurrent(handle) or C.llama_model_is_hybrid(handle)
        )
        # Tokens that layers with a sliding window attend to; 0 = none has one.
        self.n_window: int = C.llama_model_n_swa(handle)
        self.add_bos: bool = bool(C.llama_vocab_get_add_bos(self.vocab))
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        reason = None if self.is_head else not_a_text_model(handle, self.metadata)
        if reason is not None:
            self.close()
            raise UnsupportedModel(f"{self.path} {reason}; {TEXT_MODEL}")

    @property
    def handle(self) -> Any:
        """The ``llama_model *``; raises ModelError once closed."""
        if self._handle is None:
            raise ModelError(f"the model {self.path} is closed; load it again")
        return self._handle

    @property
    def vocab(self) -> Any:
        """The ``llama_vocab *``; raises ModelError once closed."""
        return self._vocab if self._handle is not None else self.handle

    @property
    def description(self) -> str:
        """Architecture, size and quantisation, such as ``llama 6.7B Q4_0``.

        As in llama.cpp, except for the size, which llama.cpp guesses from the number of layers.
        """
        architecture, _, kind = _read_string(C.llama_model_desc, self.handle).split(" ", 2)
        return f"{architecture} {size_name(self.n_params)} {kind}"

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template: ``own_template``, else the GGUF's, or None."""
        if self.own_template is not None:
            return self.own_template
        source = C.llama_model_chat_template(self.handle, None)
        return source.decode("utf-8") if source else None

    @property
    def n_host_layers(self) -> int:
        """Layers on the CPU, with their KV cache in main memory; the others are on devices."""
        n_gpu = self.n_gpu_layers  # the output matrix is offloaded first and counts as a layer
        if not self.devices:
            return self.n_layer
        return min(self.n_layer, max(0, self.n_layer + 1 - n_gpu)) if n_gpu >= 0 else 0

    @property
    def placed(self) -> str:
        """Which layers are on which devices, in words; empty if all are on the CPU."""
        n = self.n_layer - self.n_host_layers
        names = joined(self.devices)
        if n == self.n_layer:
            return f"on {names}"
        return f"{n} of {self.n_layer} layers on {names}" if n else ""

    @property
    def kv_values_per_layer(self) -> int:
        """Values per token and layer in the KV cache, keys and values together."""
        architecture = self.metadata("general.architecture")
        n_head = C.llama_model_n_head(self.handle)
        head_dim = int(
            self.metadata(f"{architecture}.attention.key_length") or self.n_embd // max(1, n_head)
        )
        return 2 * int(C.llama_model_n_head_kv(self.handle)) * head_dim

    def metadata(self, key: str) -> str | None:
        """A metadata value of the GGUF as a string, or None."""
        text = _read_string(C.llama_model_meta_val_str, self.handle, key.encode(), missing=None)
        return text or None

    def special_token(self, name: str) -> int | None:
        """The id of ``bos``, ``eos``, ``eot``, ``nl`` or ``mask``, or None if undefined."""
        token: int = getattr(C, f"llama_vocab_{name}")(self.vocab)
        return token if token >= 0 else None

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-generation tokens: EOS, EOT and the like."""
        vocab = self.vocab
        return frozenset(t for t in range(self.n_vocab) if C.llama_vocab_is_eog(vocab, t))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokenize ``text`` for continuation.

        ``add_special`` adds BOS if the model expects it, but never EOS. ``parse_special`` turns the
        text of control tokens into those tokens: right for chat templates, wrong for user text.
        Raises InvalidParameter for lone surrogates and for characters the vocabulary lacks.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"{text[error.start]!r} at position {error.start} is a lone surrogate: half a "
                f"character, or an undecodable byte; give valid UTF-8 text"
            ) from None
        charset = self._charset
        unknown = charset and charset.first_unknown(text, parse_special=parse_special)
        if unknown:
            raise InvalidParameter(
                f"the vocabulary of {self.path} has no token for {unknown!r} or its bytes; "
                f"remove it from the text"
            )
        capacity = len(data) + 8
        while True:
            buffer = (C.llama_token * capacity)()
            n: int = C.llama_tokenize(
                self.vocab, data, len(data), buffer, capacity, add_special, parse_special
            )
            if n >= 0:
                tokens = list(buffer[:n])
                if add_special and C.llama_vocab_get_add_eos(self.vocab):
                    eos = self.special_token("eos")
                    return tokens[:-1] if tokens[-1:] == [eos] else tokens
                return tokens
            capacity = -n

    @cached_property
    def _charset(self) -> Charset | None:
        return limited_charset(self.vocab, self.n_vocab)

    def has_control_tokens(self, text: str) -> bool:
        """Whether ``tokenize`` with ``parse_special`` finds control tokens in ``text``."""
        return self._control.search(text) is not None

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return token_pattern(self.vocab, self.n_vocab, CONTROL)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; for control tokens, their text.

        Raises InvalidParameter for an id outside the vocabulary.
        """
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self.n_vocab:
                raise InvalidParameter(
                    f"token {token} is not in the vocabulary; this model has tokens 0 to "
                    f"{self.n_vocab - 1}"
                )
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def texts(self, tokens: Sequence[int]) -> list[str] | None:
        """The text of each token; None if any ends generation or splits a UTF-8 character.

        The fast path of detokenization: most tokens are whole characters.
        """
        cached = self._texts
        try:
            texts = [cached[token] for token in tokens]
        except KeyError:
            for token in tokens:
                cached[token] = self._whole_text(token)
            texts = [cached[token] for token in tokens]
        return None if None in texts else texts  # type: ignore[return-value]

    def _whole_text(self, token: int) -> str | None:
        if token in self.ends:
            return None
        try:
            return self.piece(token).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of ``tokens``, concatenated."""
        return b"".join(map(self.piece, tokens))

    def _read_piece(self, token: int) -> bytes:
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n: int = C.llama_token_to_piece(self.vocab, token, buffer, capacity, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Free the weights. Idempotent."""
        if self._handle is not None:
            C.llama_model_free(self._handle)
            self._handle = None
            atexit.unregister(self.close)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def size_name(n_params: int) -> str:
    """A parameter count in the usual short form: ``260K``, ``14M``, ``6.7B``."""
    size, unit = next((n_params / n, unit) for n, unit in _UNITS if n_params >= n)
    return f"{size:.1f}{unit}" if size < 10 else f"{size:.0f}{unit}"


def _read_string(function: Callable[..., int], *args: Any, missing: Any = "") -> str:
    """Read a string from a C function that fills a buffer and returns the required length."""
    capacity = 256
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        n = function(*args, buffer, capacity)
        if n < 0:
            return missing  # type: ignore[no-any-return]
        if n < capacity:
            return buffer.value.decode("utf-8", "replace")
        capacity = n + 1


def check_file(path: Path) -> None:
    """Check that ``path`` is a GGUF. Raises ModelFileMissing or NotGGUF."""
    if not path.is_file():
        raise ModelFileMissing(
            f"file not found: {path}; check the path, or give a name from models.txt"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise NotGGUF(
            f"{path} is not a GGUF: it starts with {magic!r}, not b'GGUF'; "
            f"convert it with llama.cpp's convert_hf_to_gguf.py or choose a .gguf file"
        )


def _load_error(path: Path) -> Exception:
    """Choose the exception for a failed load from the file and llama.cpp's log."""
    log = recent_log()
    if "failed to read tensor info" in log:
        try:
            check_types(path)
        except ModelError as error:
            return error
    reason = next((line for line in reversed(log.splitlines()) if "error" in line.lower()), log)
    reason = reason.strip() or "no reason given"
    lower = log.lower()
    size = path.stat().st_size
    if "not within the file bounds" in lower or "failed to read" in lower or size < 1024:
        return TruncatedGGUF(
            f"{path} is incomplete: it ends after {size:,} bytes ({reason}); download it again"
        )
    if "unknown model architecture" in lower or "unsupported" in lower:
        return UnsupportedModel(
            f"this build of llama.cpp cannot load {path} ({reason}); "
            f"a newer llama-cpp-python may, or choose another model"
        )
    if "alloc" in lower or "out of memory" in lower:
        return OutOfMemory(
            f"not enough memory to load {path} ({size:,} bytes; {reason}); "
            f"lower {{n_gpu_layers}}, or choose a smaller model or quantisation",
            settings=("n_gpu_layers",),
            requested=size,
        )
    return ModelError(f"llama.cpp could not load {path}: {reason}")
