"""``Backend``, the app's interface to the engine, and ``LocalBackend``, which runs it in threads.

Only the dataclasses of ``messages`` cross the interface. Nothing here knows of Gradio or HTTP.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from speculation.generation import GenerationRequest
from speculation.parallel import ParallelEngine
from speculation.submitted import Submitted

from app.worker.events import Events
from app.worker.jobs import Job, JobQueue, Needs
from app.worker.loading import ModelSlot
from app.worker.messages import (
    Answer,
    Chance,
    ChatRequest,
    Detokenize,
    Done,
    EngineReport,
    Event,
    Failed,
    LeftOut,
    LoadedModel,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Opening,
    Parameter,
    Prefill,
    Question,
    Render,
    Status,
    Text,
    Tokenize,
    Value,
)
from batching.errors import InvalidParameter, ModelError
from batching.llama.model import Model
from speculation.chat.detokenizer import Token
from speculation.chat.template import (
    ChatOptions,
    ChatPrompt,
    chat_prompt,
    chat_text,
    template_of,
)
from speculation.chat.tool_grammar import tool_grammar
from speculation.chat.tools import tool_format
from speculation.chat.truncation import room_for_reply, turns_to_leave_out, without_turns
from speculation.engine import check_grammar
from speculation.logprobs import TokenLogprobs
from speculation.methods import METHODS, parameter_docs, parse_method
from speculation.registry import RegistryError, read_registry
from speculation.sampling import SamplingParams

log = logging.getLogger(__name__)


class Backend(Protocol):
    """The page's interface to an engine."""

    def methods(self) -> tuple[MethodInfo, ...]: ...

    def models(self) -> tuple[ModelInfo, ...]: ...

    def status(self) -> Status: ...

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        """Replace the model. Yields Waiting, Loading, then Loaded or Failed.

        If it fails, the old model is restored.
        """
        ...

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        """Reply to a conversation.

        Yields Waiting, LeftOut, Opening, Prefill, Text, then Done or Failed. LeftOut comes only if
        it differs from the request's. Leaving the loop over them early stops the reply.
        """
        ...

    def stop(self, request_id: str) -> None:
        """Stop the request with this id within one step. Its iterator still yields a last event."""
        ...

    def close(self) -> bool:
        """Stop everything; return whether all has ended within a few seconds."""
        ...


class AsyncBackend(Backend, Protocol):
    """The endpoint's interface to an engine: its events can also be taken in an event loop."""

    def load(self, spec: ModelSpec, request_id: str = "") -> Events: ...

    def reply(self, request: ChatRequest) -> Events: ...

    def ask(self, question: Question) -> Events:
        """Answer a question. Yields Answer or Failed."""
        ...


class LocalBackend:
    """An engine in this process. It writes as many replies at a time as it was loaded for; loads
    wait until it writes none."""

    def __init__(
        self,
        *,
        trace_batches: str | Path | None = None,
        memory: str | Path | None = None,
        on_status: Callable[[Status], object] = lambda _: None,
    ) -> None:
        """``trace_batches`` names a file that gets one JSON line per decode, ``memory`` one that
        keeps what the first model reads and writes. ``on_status`` is told of every new status."""
        self._slot = ModelSlot(trace_batches, memory, on_status)
        self._queue = JobQueue(lambda: self._slot.engine.parallel if self._slot.engine else 1)
        self._totals = EngineReport()

    def methods(self) -> tuple[MethodInfo, ...]:
        return known_methods()

    def models(self) -> tuple[ModelInfo, ...]:
        return known_models()

    def status(self) -> Status:
        return self._slot.status

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        stopped = Failed(f"loading {spec.model} was stopped")
        return self._queue.run(Job(request_id, partial(self._slot.load, spec=spec), stopped))

    def reply(self, request: ChatRequest) -> Events:
        work = partial(self._reply, request=request)
        stopped = Done("cancelled", request.method)
        return self._queue.run(Job(request.id, work, stopped, Needs.PLACE))

    def ask(self, question: Question) -> Events:
        def work(job: Job) -> None:
            job.emit(Answer(self._answer(question)))

        return self._queue.run(Job("", work, Failed("the question was withdrawn"), Needs.NOTHING))

    def stop(self, request_id: str) -> None:
        self._queue.stop(request_id)

    def close(self) -> bool:
        """Stop everything and free the model, unless a job that does not end still uses it.

        Returns whether all has ended. Idempotent.
        """
        has_ended = self._queue.close()
        if has_ended:
            self._slot.close()
        return has_ended

    def _answer(self, question: Question) -> Any:
        if isinstance(question, Tokenize):
            model = self._engine().model
            return [
                (token, model.piece(token))
                for token in model.tokenize(
                    question.text,
                    add_special=question.add_special,
                    parse_special=question.parse_special,
                )
            ]
        if isinstance(question, Detokenize):
            return self._engine().model.detokenize(question.tokens).decode("utf-8", "replace")
        if isinstance(question, Render):
            engine, request = self._engine(), question.request
            if not request.messages:
                tokens = _prompt_tokens(engine.model, request.prompt)
                return engine.model.detokenize(tokens).decode("utf-8", "replace"), len(tokens)
            options = _chat_options(engine, request)
            text = chat_text(engine.model, request.messages, **options)
            return text, len(chat_prompt(engine.model, request.messages, **options).tokens)
        return dataclasses.replace(
            self._totals,
            running=tuple(job.id for job in self._queue.replying),
            n_waiting=self._queue.n_waiting,
        )

    def _engine(self) -> ParallelEngine:
        engine, error = self._slot.engine, self._slot.status.error
        if engine is None:
            raise ModelError(f"no model is loaded; choose one and load it. {error or ''}".strip())
        return engine

    def _reply(self, job: Job, request: ChatRequest) -> None:
        engine = self._engine()
        self._slot.forget_error()
        prepared = self._prepare(job, engine, request)
        generation = engine.start(prepared)
        job.runs_on = True
        if prepared.opening:
            job.emit(Opening(prepared.opening))
        released = iter(generation.logprobs)

        def take(item: list[Token] | Exception | None) -> None:
            if isinstance(item, list):
                if item:
                    job.emit(_text(engine.model, item, islice(released, len(item))))
                return
            if isinstance(item, Exception):
                job.fail(item)
            else:
                self._totals = _added(self._totals, generation)
                job.emit(_done(generation, self._slot.status.model))
            self._queue.finish(job)

        generation.channel.forward(take)

    def _prepare(self, job: Job, engine: ParallelEngine, request: ChatRequest) -> GenerationRequest:
        sampling = dict(request.sampling)
        if request.messages:
            prompt = self._chat_prompt(job, engine, request)
            sampling |= _tool_grammar(engine.model, request, prompt.opening)
        else:
            prompt = ChatPrompt(_prompt_tokens(engine.model, request.prompt), "")
        return GenerationRequest(
            tuple(prompt.tokens),
            method=parse_method(request.method),
            sampling=SamplingParams(**sampling),
            max_tokens=request.max_tokens,
            stop=request.stop,
            progress=lambda done, total: job.emit(Prefill(done, total)),
            cancelled=job.cancelled.is_set,
            logprobs=request.logprobs,
            post_sampling=request.post_sampling,
            prediction=request.prediction,
            opening=prompt.opening,
        )

    def _chat_prompt(self, job: Job, engine: ParallelEngine, request: ChatRequest) -> ChatPrompt:
        options = _chat_options(engine, request)
        left_out = _left_out(engine, request, options["thinking"])
        if left_out != request.left_out:
            job.emit(left_out)
        messages = without_turns(request.messages, left_out.n_turns)
        if request.continue_last is not False:
            check_grammar(messages, SamplingParams(**request.sampling))
        return chat_prompt(engine.model, messages, **options)


def _chat_options(engine: ParallelEngine, request: ChatRequest) -> ChatOptions:
    return {
        "thinking": request.thinking if engine.has_thinking_switch else None,
        "tools": () if request.tool_choice == "none" else request.tools,
        "template_kwargs": request.template_kwargs,
        "continue_last": request.continue_last,
    }


def _tool_grammar(model: Model, request: ChatRequest, opening: str) -> dict[str, Any]:
    """The sampling parameters that hold calls to the request's tools to their schemas."""
    if not request.tools or request.tool_choice == "none":
        return {}
    if SamplingParams(**request.sampling).has_grammar:
        raise InvalidParameter(
            "tools come with a grammar of their own; leave out the grammar, the JSON schema or the "
            "tools, or set tool_choice to none"
        )
    format_ = tool_format(template_of(model, tools=True))
    if format_ is None:
        if request.tool_choice == "auto":
            return {}
        raise InvalidParameter(
            "the format in which this model calls tools is not known, so it cannot be made to call "
            "one; set tool_choice to auto"
        )
    found = tool_grammar(
        format_, request.tools, request.tool_choice, request.parallel_tool_calls, opening
    )
    return {} if found is None else {"grammar": found.gbnf, "grammar_triggers": found.triggers}


def _prompt_tokens(model: Model, prompt: Sequence[str | int]) -> list[int]:
    """The tokens of texts and token ids in turn; a text at the start gets the model's BOS.

    Raises InvalidParameter for a token that the model does not have.
    """
    tokens: list[int] = []
    last = model.n_vocab - 1
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += model.tokenize(part, add_special=i == 0)
        elif 0 <= part <= last:
            tokens.append(part)
        else:
            raise InvalidParameter(f"the prompt has token {part}; this model has 0 to {last}")
    return tokens


def _text(model: Model, tokens: list[Token], found: Iterator[TokenLogprobs]) -> Text:
    def chance(token: int, logprob: float) -> Chance:
        return Chance(token, model.piece(token), logprob)

    return Text(
        tuple((token.text, token.drafted) for token in tokens),
        tuple(token.id for token in tokens),
        tuple(
            (chance(token.id, one.logprob), tuple(chance(*other) for other in one.top))
            for token, one in zip(tokens, found, strict=False)
        ),
    )


def _added(totals: EngineReport, generation: Submitted) -> EngineReport:
    """The totals with those of a generation that has ended."""
    stats = generation.stats
    n_positions = max((n - 1 for n in stats.tokens_histogram), default=0)
    counts = [*totals.accepted, *[0] * (n_positions - len(totals.accepted))]
    for n_tokens, n_steps in stats.tokens_histogram.items():
        for position in range(n_tokens - 1):
            counts[position] += n_steps
    return EngineReport(
        n_requests=totals.n_requests + 1,
        n_read=totals.n_read + stats.n_prompt - stats.n_reused,
        n_reused=totals.n_reused + stats.n_reused,
        n_tokens=totals.n_tokens + stats.n_tokens,
        n_steps=totals.n_steps + stats.n_steps,
        n_drafts=totals.n_drafts + stats.n_steps - stats.rows_histogram.get(1, 0),
        n_drafted=totals.n_drafted + stats.n_drafted,
        n_accepted=totals.n_accepted + stats.n_accepted,
        prefill_seconds=totals.prefill_seconds + stats.prefill_seconds,
        decode_seconds=totals.decode_seconds + stats.decode_seconds,
        n_longest=max(totals.n_longest, stats.n_prompt + stats.n_tokens),
        accepted=tuple(counts),
    )


def _left_out(engine: ParallelEngine, request: ChatRequest, thinking: bool | None) -> LeftOut:
    if not request.leave_out:
        return LeftOut()
    before, n_ctx = request.left_out, engine.context.n_ctx
    n_turns = turns_to_leave_out(
        request.messages,
        partial(engine.count_tokens, thinking=thinking),
        n_ctx,
        room_for_reply(n_ctx, request.max_tokens),
        before.n_turns if before.n_ctx == n_ctx else 0,
    )
    return LeftOut(n_turns, n_ctx) if n_turns else LeftOut()


def known_methods() -> tuple[MethodInfo, ...]:
    """All methods."""
    return tuple(
        MethodInfo(kind.name, kind.title, _parameters(kind.params)) for kind in METHODS.values()
    )


def known_models() -> tuple[ModelInfo, ...]:
    """The models of models.txt."""
    try:
        entries = read_registry().values()
        return tuple(
            ModelInfo(e.name, e.description, e.draft, e.heads) for e in entries if not e.is_heads
        )
    except RegistryError as error:
        log.warning("%s", error)
        return ()


def _parameters(params: type[Any]) -> tuple[Parameter, ...]:
    """The fields of a method's dataclass, with their help from its docstring."""
    helps = parameter_docs(params)
    return tuple(
        Parameter(item.name, cast("Value", item.default), helps[item.name])
        for item in dataclasses.fields(params)
    )


def _done(generation: Submitted, model: LoadedModel | None) -> Done:
    stats = generation.stats
    return Done(
        finish_reason=generation.finish_reason or "stop",
        method=str(generation.method),
        model=model,
        n_prompt=stats.n_prompt,
        n_reused=stats.n_reused,
        n_tokens=stats.n_tokens,
        n_first=stats.n_first,
        n_steps=stats.n_steps,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        prefill_seconds=stats.prefill_seconds,
        decode_seconds=stats.decode_seconds,
        stop_string=generation.stop_string,
    )
