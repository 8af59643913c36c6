"""Engine: loads a model and generates text with any method. The API for users, bench and app."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batching.cache import SequenceCache
from batching.errors import (
    ContextError,
    InvalidParameter,
    UnsupportedModel,
    VocabularyMismatch,
)
from batching.gguf.reader import fingerprint
from batching.llama.context import Context, ContextParams, choose_flash_attn
from batching.llama.device_memory import CacheSize
from batching.llama.devices import Placement
from batching.llama.model import Model
from batching.llama.vocabulary import check_same_vocabulary, check_vocabulary
from speculation.auto import learnt
from speculation.auto.cost import Cost
from speculation.chat.detokenizer import Token as Token
from speculation.chat.template import ASSISTANT, Message, asks_for_thinking, chat_prompt
from speculation.conversion import model_file
from speculation.drafter import Drafter, Requirements
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.exclusive import Exclusive
from speculation.generation import DEFAULT_METHOD as DEFAULT_METHOD
from speculation.generation import Generation as Generation
from speculation.generation import GenerationRequest, Settings
from speculation.heads.base import HeadInContext
from speculation.load_heads import load_heads, require_no_heads
from speculation.methods import SAVED, Method
from speculation.registry import PAIRED, default_model, heads_for, paired_draft, resolve
from speculation.resources import Resources
from speculation.sampling import DraftDistribution, SamplingParams, make_sampler
from speculation.system.files import require_writable

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class Engine:
    """One model, one context, one generation at a time. Close it or use it as a context manager.

    Starting a generation ends the previous one, unless another thread is iterating over it:
    ``generate``, ``chat``, ``reserve``, ``prepare``, ``stop_running`` and ``close`` then raise
    EngineInUse.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        draft: Context | None = None,
        heads: Mapping[str, Any] | None = None,
        memory: Path | None = None,
    ) -> None:
        """``draft`` is the context of a draft model with the same vocabulary.

        ``heads`` are drafting heads for the model by method, as ``load_heads`` returns them.
        ``memory`` is a file as in ``load``.

        Raises VocabularyMismatch if the vocabularies differ, UnsupportedModel if the model has
        none, InvalidParameter if ``memory`` is not a memory of this model.
        """
        check_vocabulary(model)
        if draft is not None:
            check_same_vocabulary(model, draft.model)
        self.model = model
        self.context = context
        self._params = context.params  # as they were asked for
        self.draft = draft
        self.cache = SequenceCache(context)
        self._memory_file = memory
        self._learnt_file = learnt.file_for(context)
        self._learnt = learnt.load(self._learnt_file)
        # What drafts beside the target decides what its sources gain.
        beside = [draft.model.path.name if draft is not None else "", *sorted(heads or {})]
        self._states_key = " ".join(beside)
        self.resources = Resources(
            self._measure_cost,
            model=model,
            n_rewind=context.n_rewind,
            draft=draft,
            heads=heads,
            draft_sampler=self._draft_sampler,
            memory=_load_memory(memory, model),
            saved=learnt.states(self._learnt, self._states_key),
        )
        for head in self._heads_in_context():
            head.start(_head_params(context), context)
        self.exclusive = Exclusive()
        self._flash_attn = {1: context.flash_attn}  # by the rows that a method decodes
        self._running: Generation | None = None
        self._preparing: Callable[[], None] | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        params: ContextParams | None = None,
        *,
        draft_model: str | Path | None = None,
        heads: str | Path | Sequence[str | Path] = (),
        mtp: bool = True,
        n_gpu_layers: int | None = None,
        device: str | Sequence[str] | None = None,
        draft_device: str | Sequence[str] | None = None,
        rpc: str | Sequence[str] = (),
        memory: str | Path | None = None,
        chat_template: str | None = None,
        trace_batches: str | Path | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Load a GGUF by path or by its name in models.txt; None = ``default_model()``.

        draft_model    a smaller model with the same vocabulary, for the methods draft and auto, or
                       ``"paired"``: the one paired with the model in models.txt
        heads          files of heads trained for this model, one per method (docs/heads.md), or
                       ``"paired"``
        mtp            whether to load the model's own layers for multi-token prediction, if any
        n_gpu_layers   layers to offload to the GPU, if there is one, or to workers; None = all
                       that fit
        device         names of the devices for these layers, as ``speculation devices`` lists them;
                       ``none`` = the CPU alone, None = all GPUs
        draft_device   those for all layers of the draft model; None = as for the model
        rpc            addresses of RPC workers, HOST:PORT, that compute layers of the model; the
                       draft model stays on this machine
        memory         a file that keeps what this model read and wrote, for the methods suffix and
                       auto: loaded if it exists, saved on ``close``
        chat_template  a Jinja template to use instead of the GGUF's
        trace_batches  a file that gets one JSON line per decode
        progress       called with the share of the model loaded so far, then that of the draft
                       model; an exception it raises ends loading
        """
        model = default_model() if model is None else model
        memory = None if memory is None else Path(memory)
        if memory is not None:
            require_writable(memory)
        loading = model_file(model)
        placement = draft_placement = Placement.of(n_gpu_layers, device, rpc)
        if draft_device is not None:
            draft_placement = Placement.of(None, draft_device, ())
        opened: list[Model | Context | HeadInContext] = []
        try:
            params = params or ContextParams()
            cache = CacheSize(params.n_ctx, params.kv_type)
            loaded = Model(loading, placement=placement, cache=cache, mtp=mtp, progress=progress)
            opened.append(loaded)
            loaded.own_template = chat_template
            context = Context(loaded, params, trace=trace_batches)
            opened.append(context)
            given = [heads] if isinstance(heads, str | Path) else heads
            files = [resolve(name) for name in heads_for(model, given)]
            found = load_heads(files, loaded)
            opened += [head for head in found.values() if isinstance(head, HeadInContext)]
            if draft_model is None:
                return cls(loaded, context, heads=found, memory=memory)
            name = paired_draft(model) if draft_model == PAIRED else draft_model
            loading = resolve(name)
            small = Model(loading, placement=draft_placement.local, progress=progress)
            opened.append(small)
            check_same_vocabulary(loaded, small)
            draft = Context(small, _draft_params(context))
            opened.append(draft)
            draft.use_fewest_threads()
            return cls(loaded, context, draft, found, memory)
        except BaseException as error:
            for item in reversed(opened):
                item.close()
            if isinstance(error, UnsupportedModel | VocabularyMismatch | ContextError):
                require_no_heads(loading)
            raise

    def generate(self, prompt: str | Sequence[int], **settings: Unpack[Settings]) -> Generation:
        """Continue a prompt, given as text or as token ids; iterate over the result for tokens.

        Keyword arguments are the fields of ``Settings``. Ends the previous generation if it is
        still running. Raises InvalidParameter, EngineInUse.
        """
        return self._start(GenerationRequest(self._tokens(prompt), **settings))

    def _start(self, request: GenerationRequest) -> Generation:
        with self.exclusive:
            self._end_running()
            self._running = Generation(self, request)
            return self._running

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        self._require_open()
        if isinstance(prompt, str):
            return tuple(self.model.tokenize(prompt))
        tokens, last = tuple(prompt), self.model.n_vocab - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
            invalid = next(token for token in tokens if not 0 <= token <= last)
            raise InvalidParameter(f"the prompt has token {invalid}; this model has 0 to {last}")
        return tokens

    def _require_open(self) -> None:
        _ = self.model.handle  # raises if the model is closed

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        **settings: Unpack[Settings],
    ) -> Generation:
        """Reply to a conversation in the GGUF's chat format. A string is one user message.

        Messages are ``{"role": "system" | "user" | "assistant", "content": "..."}``. If the last
        one is from the assistant, generation continues it. A prefix that is still in the KV cache
        is reused. ``thinking`` turns reasoning on or off, for models with ``has_thinking_switch``;
        None = the model's default. Keyword arguments are the fields of ``Settings``. Raises
        InvalidParameter, EngineInUse.
        """
        self._require_open()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = chat_prompt(self.model, messages, thinking=thinking)
        request = GenerationRequest(tuple(prompt.tokens), opening=prompt.opening, **settings)
        check_grammar(messages, request.sampling)
        return self._start(request)

    def count_tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> int:
        """The number of prompt tokens of a conversation; for ``turns_to_leave_out``."""
        return len(chat_prompt(self.model, messages, thinking=thinking).tokens)

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the chat template can turn the model's reasoning on or off."""
        return asks_for_thinking(self.model.chat_template)

    def reserve(self, n_seq: int) -> None:
        """Make room for ``n_seq`` sequences; one is in use until a tree needs more.

        If the context has fewer, it is replaced. Ends a running generation. Raises InvalidParameter
        above 256, llama.cpp's limit.
        """
        with self.exclusive:
            self._end_running()
            self.fit(Requirements(branches=n_seq - 1))

    def fit(self, needed: Requirements) -> None:
        """Replace the context if it has too few sequences for ``needed``, or if flash attention was
        to be chosen and the other setting is faster for that many rows."""
        context = self.context
        flash_attn = self._flash_attn_for(needed.rows)
        if 1 + needed.branches > context.n_seq_max or flash_attn != context.flash_attn:
            wider = replace(
                context.params,
                n_ctx=context.n_ctx,
                n_seq_max=max(1 + needed.branches, context.n_seq_max),
                flash_attn="on" if flash_attn else "off",
            )
            attached = [head for head in self._heads_in_context() if head.attends_to_target]
            for head in attached:
                head.stop()
            context.close()
            try:
                self.context = Context(self.model, wider, trace=context.trace_path)
                # Not every model supports it; then do not try again.
                self._flash_attn[needed.rows] = self.context.flash_attn
            except BaseException:
                self.context = Context(self.model, context.params, trace=context.trace_path)
                raise
            finally:
                self.cache = SequenceCache(self.context)
                for head in attached:
                    head.start(_head_params(self.context), self.context)
        self.cache.reserve(1)

    def _flash_attn_for(self, rows: int) -> bool:
        if self._params.flash_attn != "auto":
            return self._flash_attn[1]
        if rows not in self._flash_attn:
            chosen = choose_flash_attn(self.model, self._params, rows)
            self._flash_attn[rows] = self._flash_attn[1] if chosen == "auto" else chosen == "on"
        return self._flash_attn[rows]

    def prepare(self, progress: Callable[[], None] | None = None) -> None:
        """Measure the cost of a decode now, in a second or two, instead of in the first reply.

        ``progress`` is called meanwhile; an exception it raises ends the measurement. Empties the
        KV cache. Does nothing if the cost is known, or if the model cannot drop rejected drafts and
        so never drafts.
        """
        self._require_open()
        if not self.context.n_rewind or self.resources.known_cost is not None:
            return
        with self.exclusive:
            self._end_running()
            self._preparing = progress
            try:
                _ = self.resources.cost
            finally:
                self._preparing = None

    def _measure_cost(self) -> Cost:
        self.cache.truncate(0)
        progress = self._preparing
        cost = learnt.cost(self._learnt, self.context, progress and (lambda _: progress()))
        self._save_learnt(cost)  # if this process is killed, the next one need not measure
        return cost

    def method_drafters(self, method: Method) -> list[Drafter]:
        """The drafters of a method for one text."""
        return method.drafters(self.resources)

    def _draft_sampler(self) -> DraftDistribution:
        sampling = self.resources.sampling
        sampler = make_sampler(sampling, self.model, self.context.n_ctx)
        return DraftDistribution(sampler, sampling.seed)

    def _heads_in_context(self) -> list[HeadInContext]:
        heads = self.resources.heads.values()
        return [head for head in heads if isinstance(head, HeadInContext)]

    def stop_running(self) -> None:
        """End the running generation, if any. The KV cache stays clean and usable."""
        with self.exclusive:
            self._end_running()

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def close(self) -> None:
        """Free the context and the model. Idempotent.

        Raises EngineInUse, and frees nothing, while another thread is generating.
        """
        with self.exclusive:
            if self.model.is_closed:
                return
            self._end_running()
            if self.resources.known_cost is not None:
                self._save_learnt(self.resources.known_cost)
            self._save_memory()
            for head in self._heads_in_context():
                head.close()
            self.context.close()
            self.model.close()
            if self.draft is not None:
                self.draft.close()
                self.draft.model.close()

    def _save_learnt(self, cost: Cost) -> None:
        states = self.resources.to_save(SAVED)
        learnt.save(self._learnt_file, self._learnt, cost, self._states_key, states)

    def _save_memory(self) -> None:
        """Save the memory if it has a file. A failure is only logged: the texts are not lost."""
        path = self._memory_file
        if path is not None:
            try:
                self.resources.memory.save(path, fingerprint(self.model.path))
            except OSError as error:
                log.warning("cannot save the memory in %s: %s", path, error.strerror or error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_grammar(messages: Sequence[Message], sampling: SamplingParams | None) -> None:
    """Raise InvalidParameter if a grammar would apply to the end of a reply."""
    last = messages[-1]
    is_begun = last["role"] == ASSISTANT and not last.get("tool_calls")
    if is_begun and sampling and sampling.has_grammar:
        raise InvalidParameter(
            "a grammar or JSON schema applies to a whole reply and cannot continue one; leave "
            "it out, or remove the last message to start a new reply"
        )


def _load_memory(path: Path | None, model: Model) -> SuffixMemory:
    if path is None or not path.exists():
        return SuffixMemory()
    return SuffixMemory.load(path, fingerprint(model.path), model.n_vocab)


def _draft_params(context: Context) -> ContextParams:
    """Parameters of a draft model's context: as long as the target's, with fewer branches."""
    n_batch, n_seq_max = min(context.n_batch, context.n_ctx), max(16, 2 * context.n_seq_max // 5)
    return replace(context.params, n_ctx=context.n_ctx, n_batch=n_batch, n_seq_max=n_seq_max)


def _head_params(context: Context) -> ContextParams:
    """Parameters of a head's own context: as a draft model's, with the target's flash attention."""
    flash_attn = "on" if context.flash_attn else "off"
    return replace(_draft_params(context), flash_attn=flash_attn)
