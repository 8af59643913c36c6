"""Runtime: a model with its context, its draft model, its heads, and what is learnt about them.

Everything here happens in the engine's thread (``driver``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from batching.errors import (
    ContextError,
    InvalidParameter,
    SpeculationError,
    UnsupportedModel,
    check_ranges,
)
from batching.gguf.reader import fingerprint
from batching.llama.context import Context, ContextParams
from batching.llama.context_params import MAX_SEQUENCES, MAX_SLOTS
from batching.llama.create import max_tokens
from batching.llama.devices import CacheSize, Placement
from batching.llama.exact import use_one_kernel
from batching.llama.hardware import available_memory
from batching.llama.model import ALL_LAYERS, Model
from batching.llama.sampler import SamplerChain
from batching.llama.tune import Settings, fastest, use_fewest_threads
from batching.llama.vocabulary import check_same_vocabulary, check_vocabulary
from speculation.auto import learnt
from speculation.auto.calibration import guess, measure
from speculation.drafting.cost import Cost
from speculation.drafting.resources import Resources, Seat
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.embedding import Embedder, PooledStates, PooledTexts
from speculation.heads.base import Head
from speculation.heads.file import HeadsKind
from speculation.heads.load import load_heads, require_no_heads
from speculation.registry import PAIRED, default_model, heads_for, paired_draft, resolve
from speculation.registry.conversion import model_file
from speculation.registry.describe import describe
from speculation.registry.fit import Memory, Wanted, own_context
from speculation.sampling import DraftDistribution, SamplingParams, make_sampler
from speculation.structure import Structures
from speculation.system.files import require_writable

log = logging.getLogger(__name__)

_MEASURED_CELLS = 2048  # of the context in which the cost is measured
SEQUENCES = 40  # of a text among several: recycling uses as many, lookahead 31


@dataclass(frozen=True)
class LoadParams:
    """What to load, and where: the arguments of ``Engine.load``.

    model          a GGUF by path or by its name in models.txt; None = ``default_model()``
    params         of the context
    n_ctx          tokens in the context, instead of that of ``params``
    exact          every text is the very same as with method ar, alone and from an empty
                   cache: a step has as many rows as compute the same bits as one
    parallel       texts that are written at a time; they share the context
    draft_model    a smaller model with the same vocabulary, for the methods draft and auto, or
                   ``"paired"``: the one paired with the model in models.txt
    heads          files of heads trained for this model, one per method (docs/heads.md), or
                   ``"paired"``
    mtp            whether to load the model's own layers for multi-token prediction, if any
    n_gpu_layers   layers to offload to the GPU, if there is one, or to workers; None = all
                   that fit
    n_cpu_moe      how many of the first layers have their experts in main memory even so;
                   None = as many as do not fit: experts give way before layers
    device         names of the devices for these layers, as ``speculation devices`` lists them;
                   ``none`` = the CPU alone, None = all GPUs
    draft_device   those for all layers of the draft model; None = as for the model
    rpc            addresses of RPC workers, HOST:PORT, that compute layers of the model; the
                   draft model stays on this machine
    memory         a file that keeps what this model read and wrote, for the methods suffix and
                   auto: loaded if it exists, saved on ``close``
    keep_texts     MB of texts that nobody writes, kept on disk in the cache folder, for all
                   models together. They are there again when the model is loaded again with
                   the same settings
    chat_template  a Jinja template to use instead of the GGUF's
    trace_batches  a file that gets one JSON line per decode
    embedding_model  a model for ``embed``, of those that write no text; None = the model itself
    progress       called with the share of the model loaded so far, then that of the draft
                   model, in the engine's thread; an exception it raises ends loading
    kinds, saved   set by the engine: the kinds of heads that the methods draft with, and the
                   methods of which what is learnt is saved
    """

    model: str | Path | None = None
    params: ContextParams | None = None
    _: KW_ONLY
    n_ctx: int | None = None
    exact: bool = False
    parallel: int = 1
    draft_model: str | Path | None = None
    heads: str | Path | Sequence[str | Path] = ()
    mtp: bool = True
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    device: str | Sequence[str] | None = None
    draft_device: str | Sequence[str] | None = None
    rpc: str | Sequence[str] = ()
    memory: str | Path | None = None
    keep_texts: int = 0
    chat_template: str | None = None
    trace_batches: str | Path | None = None
    embedding_model: str | Path | None = None
    progress: Callable[[float], None] | None = None
    kinds: Sequence[HeadsKind] = ()
    saved: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.heads, bool) or self.heads is None:
            raise InvalidParameter(
                f"heads is {self.heads!r}; give files, or 'paired' for those that models.txt names"
            )
        check_ranges(self, (("parallel", 1, MAX_SLOTS), ("n_cpu_moe", 0, ALL_LAYERS)))
        if self.keep_texts < 0:
            raise InvalidParameter(
                f"{{keep_texts}} is {self.keep_texts}; give 0 or more", settings=("keep_texts",)
            )

    @property
    def context_params(self) -> ContextParams:
        """Those of the context: several texts divide its sequences among them."""
        params, n = self.params or ContextParams(), self.parallel
        n_ctx = params.n_ctx if self.n_ctx is None else self.n_ctx
        params = replace(params, n_ctx=n_ctx, exact=params.exact or self.exact)
        if params.exact:
            return replace(params, n_seq_max=n, n_slots=n)
        if n == 1:
            return params
        n_seq_max = max(min(SEQUENCES * n, MAX_SEQUENCES), params.n_seq_max)
        return replace(params, n_seq_max=n_seq_max, n_slots=n)

    @property
    def memory_file(self) -> Path | None:
        return None if self.memory is None else Path(self.memory)


class Runtime:
    """A loaded model, its context, and what the methods share."""

    def __init__(
        self,
        source: LoadParams,
        model: Model,
        context: Context,
        heads: Mapping[str, Head],
        draft: Context | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        """What was loaded from ``source``: ``heads`` as ``load_heads`` returns them, ``draft``, the
        context of a draft model, and ``embedder``, which has an embedding model.

        Raises UnsupportedModel if the vocabularies differ or the model has none, InvalidParameter
        if ``source.memory`` is not a memory of this model.
        """
        check_vocabulary(model)
        if draft is not None:
            check_same_vocabulary(model, draft.model)
        self.model, self.context, self.draft = model, context, draft
        self._source = source
        self.structures = Structures(model)
        self._embedder = embedder
        self._learnt_file = learnt.file_for(context)
        self._learnt = learnt.load(self._learnt_file)
        # What drafts beside the target decides what its sources gain.
        beside = [draft.model.path.name if draft is not None else "", *sorted(heads)]
        self._states_key = " ".join(beside)
        self.resources = Resources(
            self._first_cost,
            n_rewind=context.n_rewind,
            seat=Seat(draft, heads),
            # A step reads all weights, so that they say what it takes.
            draft_share=draft.model.n_bytes / model.n_bytes if draft is not None else 0.0,
            draft_sampler=self._draft_sampler,
            memory=SuffixMemory()
            if source.memory_file is None or not source.memory_file.exists()
            else SuffixMemory.load(source.memory_file, fingerprint(model.path), model.n_vocab),
            saved=learnt.states(self._learnt, self._states_key),
        )

    @classmethod
    def open(cls, source: LoadParams, progress: Callable[[float], None] | None = None) -> Runtime:
        """Load what ``source`` says. ``progress`` as in ``Engine.load``."""
        name = default_model() if source.model is None else source.model
        if source.memory_file is not None:
            require_writable(source.memory_file)
        loading = model_file(name)
        placement = draft_placement = Placement.of(
            source.n_gpu_layers, source.n_cpu_moe, source.device, source.rpc
        )
        if source.draft_device is not None:
            draft_placement = Placement.of(device=source.draft_device)
        opened: list[Model | Head] = []  # a model closes its contexts
        try:
            params, draft_file = source.context_params, None
            if source.draft_model is not None:
                is_paired = source.draft_model == PAIRED
                draft_file = resolve(paired_draft(name) if is_paired else source.draft_model)
            if not params.n_ctx:
                files = [loading] if draft_file is None else [loading, draft_file]
                params = replace(params, n_ctx=_own_context(files, params, placement))
            cache = CacheSize(params.n_ctx, params.kv_type)
            settings_file = learnt.settings_file(loading, params, placement)
            settings = learnt.settings(settings_file) or Settings()
            if params.exact:
                use_one_kernel()
                settings = Settings(repack=False)  # repacked weights have two kernels
            model = Model(
                loading,
                placement=placement,
                cache=cache,
                mtp=source.mtp,
                repack=settings.repack,
                progress=progress,
            )
            opened.append(model)
            model.own_template = source.chat_template
            if params.exact:
                params = replace(params, n_ubatch=learnt.equal_rows(model, params))
            context = Context(model, settings.fill(params), trace=source.trace_batches)
            given = [source.heads] if isinstance(source.heads, str | Path) else source.heads
            files = [resolve(file) for file in heads_for(name, given)]
            heads = load_heads(files, model, source.kinds)
            opened += heads.values()
            for head in heads.values():
                head.start(_head_params(context), context)
            embedder: Embedder | None = None
            if source.embedding_model is not None:
                loading = model_file(source.embedding_model)
                other = Model(loading, placement=placement.local, embedding=True, progress=progress)
                opened.append(other)
                embedder = PooledTexts(other, params.n_threads)
            if draft_file is None:
                return cls(source, model, context, heads, embedder=embedder)
            loading = draft_file
            small = Model(loading, placement=draft_placement.local, progress=progress)
            opened.append(small)
            check_same_vocabulary(model, small)
            wanted = _draft_params(context)
            n_ctx = min(wanted.n_ctx, max_tokens(small) * wanted.n_slots)
            draft = Context(small, replace(wanted, n_ctx=n_ctx))
            use_fewest_threads(draft)
            return cls(source, model, context, heads, draft, embedder)
        except BaseException as error:
            for item in reversed(opened):
                item.close()
            if isinstance(error, UnsupportedModel | ContextError):
                require_no_heads(loading, source.kinds)
            raise

    def widen(self, n_branches: int) -> None:
        """Replace the context by one with sequences for so many branches. Its texts are lost.

        If that fails, the context is made again as it was. If that fails, too, the engine cannot
        go on: every later use raises the error that it raised.
        """
        context = self.context
        wider = replace(
            context.params,
            n_ctx=context.n_ctx,
            n_seq_max=1 + n_branches,
            flash_attn="on" if context.flash_attn else "off",  # measured when it was first made
        )
        attached = [head for head in self.resources.seat.heads.values() if head.attends_to_target]
        for head in attached:
            head.stop()
        context.close()
        try:
            try:
                self.context = Context(self.model, wider, trace=context.trace_path)
            except BaseException:
                self.context = Context(self.model, context.params, trace=context.trace_path)
                raise
        finally:
            if not self.context.is_closed:
                for head in attached:
                    head.start(_head_params(self.context), self.context)

    def measure(self, progress: Callable[[], None] | None = None) -> None:
        """Measure what a decode costs, if that is not known and the model can draft at all.

        An exception from ``progress``, and GivenUp, end the measurement.
        """
        if self.context.n_rewind and (cost := self.resources.cost).is_rough:
            with self._small() as context:
                found = measure(context, progress=progress and (lambda _: progress()))
            cost.set(found.near, found.far, is_rough=found.is_rough)
            self._save_learnt(cost)  # if this process is killed, the next one need not measure

    def rest(self) -> None:
        """Measure what is not known of this model on this machine, for this run and later ones.

        GivenUp ends it.
        """
        self.measure()
        params = self._source.context_params
        file = learnt.settings_file(self.model.path, params, self.model.placement)
        if not params.exact and learnt.settings(file) is None:
            found = fastest(self.model, params, Settings())
            learnt.save_settings(file, found)
            if found != Settings():
                log.info("%s will be faster from its next start on: %s", self.model.path, found)

    def _first_cost(self) -> Cost:
        """The cost that was measured in an earlier run, or a guess."""
        if (found := learnt.cost(self._learnt)) is not None:
            return found
        with self._small() as context:
            return guess(context)

    def _small(self) -> Context:
        """A context like that of the model, to measure in."""
        context = self.context
        flash_attn = "on" if context.flash_attn else "off"
        own = replace(context.params, n_slots=1, n_seq_max=2, flash_attn=flash_attn)
        return Context(self.model, replace(own, n_ctx=min(_MEASURED_CELLS, context.text_limit)))

    def _draft_sampler(self, sampling: SamplingParams) -> DraftDistribution:
        chain = make_sampler(sampling, self.model, self.context.n_ctx)
        assert isinstance(chain, SamplerChain), "drafts are sampled if the text is"
        return DraftDistribution(chain, sampling.seed)

    @property
    def embedding_model(self) -> str:
        """The path of the embedding model, if there is one."""
        other = None if self._embedder is None else self._embedder.model
        return "" if other in (None, self.model) else str(other.path)

    @property
    def embedder(self) -> Embedder:
        """What gives texts vectors: the embedding model, else the model itself."""
        if self._embedder is None:
            self._embedder = PooledStates(self.context)
        return self._embedder

    def close(self) -> None:
        """Save what was learnt, and free everything."""
        if self.model.is_closed:
            return
        if self.resources.kept.cost is not None:
            self._save_learnt(self.resources.kept.cost)
        self._save_memory()
        if self._embedder is not None:
            self._embedder.close()
        for head in self.resources.seat.heads.values():
            head.close()
        self.model.close()  # with its contexts
        if self.draft is not None:
            self.draft.model.close()

    def _save_learnt(self, cost: Cost) -> None:
        states = self.resources.to_save(self._source.saved)
        learnt.save(self._learnt_file, self._learnt, cost, self._states_key, states)

    def _save_memory(self) -> None:
        """Save the memory if it has a file. A failure is only logged: the texts are not lost."""
        path = self._source.memory_file
        if path is not None:
            try:
                self.resources.memory.save(path, fingerprint(self.model.path))
            except OSError as error:
                log.warning("cannot save the memory in %s: %s", path, error.strerror or error)


def _own_context(files: Sequence[Path], params: ContextParams, placement: Placement) -> int:
    """``own_context`` for a model and what is loaded beside it; 0 if a file cannot be read, which
    loading it will tell."""
    n_own = params.n_slots if params.exact else 1  # texts with cells of their own
    try:
        shapes = [describe(file) for file in files]
    except (SpeculationError, OSError):
        return 0
    shape = replace(
        shapes[0],
        n_bytes=sum([shape.n_bytes for shape in shapes]),
        expert_bytes=sum([shape.expert_bytes for shape in shapes]),
        kv_values=n_own * sum([shape.kv_values for shape in shapes]),
    )
    free = tuple((device.name, device.memory[0]) for device in placement.chosen())
    wanted = Wanted(0, params.kv_type, placement.n_gpu_layers, placement.n_cpu_moe)
    return n_own * own_context(shape, wanted, Memory(available_memory(), free))


def _draft_params(context: Context) -> ContextParams:
    """Parameters of a draft model's context: as long as the target's, with fewer branches."""
    n_batch, n_seq_max = min(context.n_batch, context.n_ctx), max(16, 2 * context.n_seq_max // 5)
    own = replace(context.params, exact=False, n_ubatch=None)
    return replace(own, n_ctx=context.n_ctx, n_batch=n_batch, n_seq_max=n_seq_max)


def _head_params(context: Context) -> ContextParams:
    """Parameters of a head's own context: as a draft model's, with the target's flash attention."""
    flash_attn = "on" if context.flash_attn else "off"
    return replace(_draft_params(context), flash_attn=flash_attn)
