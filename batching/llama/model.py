"""A GGUF model: loading, vocabulary, metadata. Part of the llama.cpp edge."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import llama_cpp.llama_cpp as C

from batching.errors import (
    InvalidParameter,
    ModelError,
    UnsupportedModel,
    require_types,
    utf8,
)
from batching.gguf.mtp import MtpLayers, find_mtp_layers
from batching.gguf.unsupported import TEXT_MODEL, check_model_file, check_types
from batching.llama import private_api
from batching.llama.charset import CONTROL, Charset, limited_charset, token_pattern
from batching.llama.devices import (
    ANYWHERE,
    EXPERTS,
    CacheSize,
    Placement,
    choose_layers,
    in_main_memory,
    kv_values,
)
from batching.llama.hardware import choose_cuda_graphs
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import clear_log, initialise, reason
from batching.llama.native import Native, NativeModel, filled
from batching.llama.tokenizer import Tokenizer
from batching.tree import NO_LIMIT

ALL_LAYERS = 999

_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"), (1, ""))
_SPECIAL = {name: getattr(C, f"llama_vocab_{name}") for name in "bos eos eot nl mask".split()}
# Marks of a file with a gap, for models that were trained to fill one.
_GAP = {"prefix": "pre", "suffix": "suf", "middle": "mid", "repository": "rep", "file": "sep"}
_FIM = {name: getattr(C, f"llama_vocab_fim_{short}") for name, short in _GAP.items()}


class User(Protocol):
    """What uses a model, and is closed with it: a context."""

    def close(self) -> None: ...
    def forget(self) -> None: ...


class Model:
    """A loaded GGUF: weights, vocabulary and metadata. A context manager that closes it.

    users        what is closed with it: its contexts
    is_repacked  whether weights were rearranged for this CPU, where that is possible
    n_cpu_moe    its first layers, whose experts are in main memory
    kv_values    keys and values of a token in the cache of each layer, at most

    Raises ModelError if the file is missing, damaged or incomplete, UnsupportedModel, OutOfMemory.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        placement: Placement = ANYWHERE,
        cache: CacheSize | None = None,
        mtp: bool = False,
        embedding: bool = False,
        repack: bool = True,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load ``path``. ``mtp`` also loads the model's multi-token-prediction layers, if any;
        ``embedding`` takes models that write no text, too. ``repack`` lets llama.cpp rearrange
        weights for this CPU, which costs memory and the time to load, and brings other kernels.

        Of what ``placement`` leaves open, as much goes to the devices as fits together with its
        part of ``cache``.

        ``progress`` is called with the share of the weights loaded, 0 to 1; an exception from it
        stops the load.
        """
        self.path = Path(path)
        self.is_repacked = repack
        self.dry_links: dict[tuple[Any, ...], Native] = {}  # see ``sampler.dry_link``
        files = check_model_file(self.path)
        initialise()
        clear_log()
        params = C.llama_model_default_params()
        self.placement = placement
        self.devices = placement.chosen()
        offload = choose_layers(files, self.devices, placement, cache)
        n_gpu_layers, self.n_cpu_moe, split = offload
        params.n_gpu_layers = ALL_LAYERS if n_gpu_layers is None else n_gpu_layers
        # These must outlive the call below.
        native_devices = placement.native(self.devices)
        overrides = in_main_memory(EXPERTS, self.n_cpu_moe)
        shares = (ctypes.c_float * C.llama_max_devices())(*split)
        params.devices = ctypes.cast(native_devices, ctypes.c_void_p)
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        params.tensor_split = shares  # all zero: llama.cpp chooses
        params.load_mtp = mtp
        params.use_extra_bufts = repack

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
        self._native: NativeModel | None = NativeModel(handle)
        self.users: WeakSet[User] = WeakSet()
        _open.add(self)
        self.n_gpu_layers: int = params.n_gpu_layers
        self.kv_values = kv_values(files[0])
        self.n_vocab: int = C.llama_vocab_n_tokens(self.vocab)
        self.own_template: str | None = None
        self.n_embd: int = C.llama_model_n_embd(handle)
        self.n_embd_out: int = C.llama_model_n_embd_out(handle)  # width of hidden states
        self.architecture = architecture = self.metadata("general.architecture")
        self.dual_input = architecture in private_api.DUAL_INPUT_HEADS
        self.is_head = architecture in private_api.HEAD_ARCHITECTURES
        self.n_layer: int = C.llama_model_n_layer(handle)
        # Multi-token prediction: the model exposes the layers' input state; number of layers
        # loaded and runnable; the file has no other layers.
        self.exposes_mtp_state = architecture in private_api.EXPOSES_MTP_STATE
        mtp_layers = MtpLayers(0, mtp_only=False)
        if C.llama_model_n_layer_nextn(handle):
            mtp_layers = find_mtp_layers(self.path)
        self.n_mtp = mtp_layers.n_layers if mtp else 0
        self.is_mtp_only = mtp_layers.mtp_only
        self.n_ctx_train: int = C.llama_model_n_ctx_train(handle)
        # llama.cpp aborts past the end of learned position embeddings, as GPT-2 has.
        learned_positions = any("position_embd.weight" in file.tensors for file in files)
        self.n_positions = self.n_ctx_train if learned_positions else NO_LIMIT
        self.n_params: int = C.llama_model_n_params(handle)
        self.n_bytes: int = C.llama_model_size(handle)
        choose_cuda_graphs(self.n_bytes)
        # Only a pure KV cache can drop any part of a sequence.
        self.can_rewind = not (
            C.llama_model_is_recurrent(handle) or C.llama_model_is_hybrid(handle)
        )
        # Tokens that layers with a sliding window attend to; 0 = none has one.
        self.n_window: int = C.llama_model_n_swa(handle)
        self.add_bos: bool = bool(C.llama_vocab_get_add_bos(self.vocab))
        self.add_eos: bool = bool(C.llama_vocab_get_add_eos(self.vocab))
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        causal = self.metadata(f"{architecture}.attention.causal") != "false"
        unsuited = private_api.not_a_text_model(handle, architecture, causal=causal)
        if unsuited is not None and not (self.is_head or embedding):
            self.close()
            raise UnsupportedModel(
                f"{self.path} {unsuited}; {TEXT_MODEL}", settings=("embedding_model",)
            )

    @property
    def native(self) -> NativeModel:
        """The loaded model, to be held while it is used; raises ModelError once closed."""
        native = self._native
        if native is None:
            raise ModelError(f"the model {self.path} is closed; load it again")
        return native

    @property
    def handle(self) -> Any:
        """The ``llama_model *``; raises ModelError once closed."""
        return self.native.handle

    @property
    def vocab(self) -> Any:
        """The ``llama_vocab *``; raises ModelError once closed."""
        return self.native.vocab

    @property
    def description(self) -> str:
        """Architecture, size and quantisation, such as ``llama 6.7B Q4_0``.

        As in llama.cpp, except for the size, which llama.cpp guesses from the number of layers.
        """
        native = self.native
        architecture, _, kind = _read_string(C.llama_model_desc, native.handle).split(" ", 2)
        return f"{architecture} {size_name(self.n_params)} {kind}"

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template: ``own_template``, else the GGUF's, or None."""
        if self.own_template is not None:
            return self.own_template
        native = self.native
        source = C.llama_model_chat_template(native.handle, None)
        return source.decode("utf-8") if source else None

    @property
    def n_host_layers(self) -> int:
        """Layers on the CPU, with their KV cache in main memory; the others are on devices."""
        n_gpu = self.n_gpu_layers  # the output matrix is offloaded first and counts as a layer
        if not self.devices:
            return self.n_layer
        return min(self.n_layer, max(0, self.n_layer + 1 - n_gpu)) if n_gpu >= 0 else 0

    def metadata(self, key: str) -> str | None:
        """A metadata value of the GGUF as a string, or None."""
        native = self.native
        return _read_string(C.llama_model_meta_val_str, native.handle, key.encode()) or None

    def check_layer_inputs(self, layers: Sequence[int]) -> None:
        """Raise UnsupportedModel if llama.cpp does not expose the inputs of ``layers``.

        With MTP layers, the one after the last stands for the state that they start from.
        """
        if layers:
            private_api.check_functions()
        if self.exposes_mtp_state:
            layers = [layer for layer in layers if layer != self.n_layer]
        exposed = private_api.EXPOSES_LAYER_INPUTS
        if layers and self.architecture not in exposed:
            raise UnsupportedModel(
                f"{self.path} has architecture {self.architecture}, whose layer inputs llama.cpp "
                f"does not expose; it exposes those of {', '.join(exposed)}"
            )
        for layer in layers:
            if not 0 <= layer < self.n_layer:
                raise UnsupportedModel(
                    f"the heads need the input of layer {layer}, but {self.path} has layers 0 to "
                    f"{self.n_layer - 1}; use heads made for this model"
                )

    def special_token(self, name: str) -> int | None:
        """The id of ``bos``, ``eos``, ``eot``, ``nl`` or ``mask``, or None if undefined."""
        native = self.native
        token: int = _SPECIAL[name](native.vocab)
        return token if token >= 0 else None

    @property
    def fim_tokens(self) -> dict[str, int]:
        """The ids of the marks for filling in the middle that the vocabulary has, by name."""
        native = self.native
        found = {name: get(native.vocab) for name, get in _FIM.items()}
        return {name: token for name, token in found.items() if token >= 0}

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-generation tokens: EOS, EOT and the like."""
        native = self.native
        return frozenset(t for t in range(self.n_vocab) if C.llama_vocab_is_eog(native.vocab, t))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokenize ``text`` for continuation.

        ``add_special`` adds BOS if the model expects it, but never EOS. ``parse_special`` turns the
        text of control tokens into those tokens: right for chat templates, wrong for user text.
        Raises InvalidParameter for lone surrogates and for characters the vocabulary lacks.
        """
        require_types({"text": text}, {"text": str})
        data = utf8(text)
        native, charset = self.native, self._charset
        unknown = charset and charset.first_unknown(text, parse_special=parse_special)
        if unknown:
            raise InvalidParameter(
                f"the vocabulary of {self.path} has no token for {unknown!r} or its bytes; "
                f"remove it from the text"
            )
        return Tokenizer(native, self.piece).tokenize(
            data, add_special=add_special, parse_special=parse_special
        )

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, at least. No text of n tokens is longer than n times that."""
        vocab = self.native.vocab
        return max(len(C.llama_vocab_get_text(vocab, token)) for token in range(self.n_vocab))

    @cached_property
    def _charset(self) -> Charset | None:
        return limited_charset(self.native, self.n_vocab)

    def is_control(self, token: int) -> bool:
        """Whether a token is none of a text's: a mark, an end, or one that no text has."""
        attributes = C.llama_vocab_get_attr(self.native.vocab, token)
        return token in self.ends or bool(attributes & (CONTROL | C.LLAMA_TOKEN_ATTR_UNUSED))

    def has_control_tokens(self, text: str) -> bool:
        """Whether ``tokenize`` with ``parse_special`` finds control tokens in ``text``."""
        return self._control.search(text) is not None

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return token_pattern(self.native, self.n_vocab, CONTROL)

    @cached_property
    def marks(self) -> dict[str, int]:
        """The control tokens by their texts."""
        tokens = filter(self.is_control, range(self.n_vocab))
        return {self.piece(token).decode("utf-8", "replace"): token for token in tokens}

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
        whole = [text for text in texts if text is not None]
        return whole if len(whole) == len(texts) else None

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
        read, vocab = C.llama_token_to_piece, self.native.vocab
        make = ctypes.create_string_buffer
        piece: bytes = filled(make, 64, lambda data, n: read(vocab, token, data, n, 0, True))
        return piece

    @property
    def is_closed(self) -> bool:
        return self._native is None

    def close(self) -> None:
        """Close its contexts, each after its running decode, and free the weights. Idempotent.

        Later use raises ModelError. A call in another thread that still needs the weights finishes
        first, and they are freed after it.
        """
        self._native = None
        for user in list(self.users):
            user.close()
        _open.discard(self)

    def forget(self) -> None:
        """Close it, and its contexts, in a fork of the process that loaded it."""
        self._native = None
        for user in list(self.users):
            user.forget()
        _open.discard(self)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def size_name(n_params: int) -> str:
    """A parameter count in the usual short form: ``260K``, ``14M``, ``6.7B``."""
    size, unit = next((n_params / n, unit) for n, unit in _UNITS if n_params >= n)
    return f"{size:.1f}{unit}" if size < 10 else f"{size:.0f}{unit}"


def _read_string(function: Callable[..., int], *args: Any) -> str:
    """Read a string from a C function that fills a buffer and returns the required length; empty
    if there is none."""
    capacity = 256
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        n = function(*args, buffer, capacity)
        if n < 0:
            return ""
        if n < capacity:
            return buffer.value.decode("utf-8", "replace")
        capacity = n + 1


def _load_error(path: Path) -> ModelError:
    """The exception for a failed load. The file was checked, so llama.cpp's log has the reason."""
    try:
        check_types(path)
    except ModelError as error:
        return error
    return UnsupportedModel(
        f"llama.cpp could not load {path} ({path.stat().st_size:,} bytes): {reason()}; if memory "
        f"is short, lower {{n_gpu_layers}} or choose a smaller quantisation; otherwise a newer "
        f"llama-cpp-python may load it, or choose another model",
        settings=("n_gpu_layers",),
    )


_open: WeakSet[Model] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Metal aborts at exit if anything is not freed."""
    for model in list(_open):
        model.close()


def _forget_all() -> None:
    """A fork cannot use llama.cpp's objects: its threads stayed in the other process."""
    for model in list(_open):
        model.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_all)
