"""Turns requests of clients into requests to the engine: templates, tokens, grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import nan

from app.worker.messages import (
    Answer,
    Chance,
    ChatRequest,
    Detokenize,
    Embed,
    Event,
    LeftOut,
    Opening,
    PromptTokens,
    Question,
    Render,
    Tokenize,
)
from batching.errors import InvalidParameter
from batching.llama.model import Model
from batching.watched import checkpoint
from speculation.chat.reasoning import thinking_marks
from speculation.chat.template import ChatOptions, ChatPrompt, chat_prompt, chat_text, template_of
from speculation.chat.tool_format import GENERIC, tool_format
from speculation.chat.tool_grammar import reply_grammar
from speculation.chat.truncation import room_for_reply, turns_to_leave_out, without_turns
from speculation.drafter import Method
from speculation.engine import Engine, check_grammar
from speculation.methods import parse_method
from speculation.request import Request as EngineRequest
from speculation.sampling import SamplingParams, TokenLogprobs


def prepared(
    engine: Engine,
    request: ChatRequest,
    emit: Callable[[Event], object],
    progress: Callable[[int, int], None],
    waiting: Callable[[int], None],
) -> EngineRequest:
    """The request to the engine. Emits LeftOut and Opening. Raises what is wrong with it."""
    sampling = SamplingParams(**request.sampling)
    if request.messages:
        prompt = _chat_prompt(engine, request, sampling, emit)
        sampling = _reply_grammar(engine.model, request, sampling, prompt)
    else:
        prompt = ChatPrompt(_prompt_tokens(engine.model, request.prompt), "")
    if prompt.opening or request.tools:
        calls = tool_format(template_of(engine.model, tools=True)) if request.tools else GENERIC
        emit(Opening(prompt.opening, calls))
    scored = None
    if request.echo is not None and request.logprobs is not None:
        scored = _scored(engine.model, iter(prompt.tokens), emit)
    return EngineRequest(
        (*prompt.tokens, *request.begun),
        method=_method(request.method),
        sampling=sampling,
        max_tokens=request.max_tokens,
        stop=(*request.stop, *prompt.stop),
        progress=progress,
        waiting=waiting,
        logprobs=request.logprobs,
        post_sampling=request.post_sampling,
        prediction=tuple(engine.model.tokenize(request.prediction, add_special=False)),
        opening=prompt.opening,
        memory=request.memory,
        on_disk=request.on_disk,
        reuse=request.reuse,
        record=request.record,
        scored=scored,
    )


def chances(model: Model, token: int, found: TokenLogprobs) -> tuple[Chance, tuple[Chance, ...]]:
    """A token with its probability, and the likeliest ones in its place."""
    top = tuple(Chance(one, model.piece(one), logprob) for one, logprob in found.top)
    return Chance(token, model.piece(token), found.logprob), top


def _scored(
    model: Model, prompt: Iterator[int], emit: Callable[[Event], object]
) -> Callable[[Sequence[TokenLogprobs]], object]:
    """What emits the prompt's tokens as they are read: the first one now."""
    for token in islice(prompt, 1):
        emit(PromptTokens((chances(model, token, TokenLogprobs(nan, ())),)))

    def take(found: Sequence[TokenLogprobs]) -> None:
        # ``found`` comes first: zip takes one more of what comes first than of the rest.
        pairs = zip(found, prompt, strict=False)
        emit(PromptTokens(tuple(chances(model, token, one) for one, token in pairs)))

    return take


def answer_to(engine: Engine, question: Question) -> Answer:
    """The answer to a question."""
    model = engine.model
    if isinstance(question, Tokenize):
        tokens = model.tokenize(
            question.text, add_special=question.add_special, parse_special=question.parse_special
        )
        piece = model.piece if question.with_pieces else lambda _: b""
        return Answer(tokens=tuple((token, piece(token)) for token in tokens))
    if isinstance(question, Detokenize):
        return Answer(_text(model, question.tokens))
    if isinstance(question, Embed):
        return _embedded(engine, question)
    assert isinstance(question, Render)
    request = question.request
    if request.messages:
        prompt = chat_prompt(model, request.messages, **_chat_options(engine, request))
        return Answer(shown_prompt(engine, request, ()), len(prompt.tokens))
    tokens = _prompt_tokens(model, request.prompt)
    return Answer(shown_prompt(engine, request, tokens), len(tokens))


def _embedded(engine: Engine, asked: Embed) -> Answer:
    texts: list[str | Sequence[int]] = []
    for parts in asked.texts:
        if len(parts) == 1 and isinstance(parts[0], str):
            texts.append(parts[0])
        else:
            ids = [part for part in parts if isinstance(part, int)]
            if len(ids) < len(parts):
                raise InvalidParameter("an input has texts and token ids; give one or the other")
            texts.append(ids)
    found = engine.embed(texts, check=checkpoint)
    return Answer(
        n_tokens=sum(found.n_tokens),
        vectors=tuple(vector.astype("<f4").tobytes() for vector in found.vectors),
    )


def shown_prompt(engine: Engine, request: ChatRequest, prompt: Sequence[int]) -> str:
    """The prompt as the model reads it; ``prompt`` are its tokens if it is no conversation."""
    if not request.messages:
        return _text(engine.model, prompt)
    return chat_text(engine.model, request.messages, **_chat_options(engine, request))


def _method(text: str) -> Method:
    """A method by its name. A file is refused: a client would run code with it."""
    if ".py:" in text:
        raise InvalidParameter(
            f"method is {text!r:.80}, but requests cannot name a file; start the server with "
            f"--method FILE.py:SPEC, and give the method's name"
        )
    return parse_method(text)


def _text(model: Model, tokens: Sequence[int]) -> str:
    return model.detokenize(tokens).decode("utf-8", "replace")


def _chat_prompt(
    engine: Engine, request: ChatRequest, sampling: SamplingParams, emit: Callable[[Event], object]
) -> ChatPrompt:
    options = _chat_options(engine, request)
    left_out = _left_out(engine, request, options["thinking"])
    if left_out != request.left_out:
        emit(left_out)
    messages = without_turns(request.messages, left_out.n_turns)
    if request.continue_last is not False:
        check_grammar(messages, sampling)
    return chat_prompt(engine.model, messages, **options)


def _chat_options(engine: Engine, request: ChatRequest) -> ChatOptions:
    return {
        "thinking": request.thinking if engine.has_thinking_switch else None,
        "tools": request.listed_tools,
        "template_kwargs": request.template_kwargs,
        "continue_last": request.continue_last,
    }


def _left_out(engine: Engine, request: ChatRequest, thinking: bool | None) -> LeftOut:
    if not request.leave_out:
        return LeftOut()
    before, n_ctx = request.left_out, engine.context.text_limit
    n_turns = turns_to_leave_out(
        request.messages,
        partial(engine.count_tokens, thinking=thinking),
        n_ctx,
        room_for_reply(n_ctx, request.max_tokens),
        before.n_turns if before.n_ctx == n_ctx else 0,
    )
    return LeftOut(n_turns, n_ctx) if n_turns else LeftOut()


def _reply_grammar(
    model: Model, request: ChatRequest, sampling: SamplingParams, prompt: ChatPrompt
) -> SamplingParams:
    """The sampling parameters, with a grammar for calls of the request's tools, or against them,
    and for its JSON schema, which begin after the reasoning."""
    if sampling.grammar is not None or sampling.regex is not None:
        if request.tools and request.tool_choice != "none":
            raise InvalidParameter(
                "tools come with a grammar of their own; leave out the grammar or the tools, or "
                "set tool_choice to none"
            )
        return sampling
    template = template_of(model, tools=bool(request.tools))
    opening, marks = prompt.opening, model.marks
    thinking = None if prompt.in_answer else thinking_marks(opening or template)
    if request.thinking is False and not opening and thinking and not thinking.answer:
        thinking = None
    budget = request.thinking_budget if thinking else None
    if not request.tools and budget is None and (sampling.json_schema is None or thinking is None):
        return sampling
    if thinking and budget is not None:  # its marks are tokens then, whatever their kind
        split = {
            mark: model.tokenize(mark, add_special=False, parse_special=True) for mark in thinking
        }
        marks = {**marks, **{mark: ids[0] for mark, ids in split.items() if len(ids) == 1}}
    grammar = reply_grammar(
        marks.get,
        tool_format(template),
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls,
        answer=sampling.json_schema,
        strict=sampling.strict,
        thinking=thinking,
        begun=bool(opening),
        budget=budget,
        ends=model.ends,
        others=model.marks.values(),
    )
    return sampling if grammar is None else replace(sampling, grammar=grammar, json_schema=None)


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
