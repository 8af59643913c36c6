"""Measures every method on every prompt, and compares each text with plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from batching.cache import Reading
from batching.errors import InvalidParameter
from batching.rows import tree_rows
from batching.tree import Floats, TokenTree
from speculation.bench.prompt_file import Prompt
from speculation.bench.results import Difference, Run, Skipped, first_difference
from speculation.chat.template import Message, chat_prompt
from speculation.drafter import BASELINE, Method
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.reply import Reply
from speculation.sampling import SamplingParams

WARM_UP_TOKENS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What to run on each prompt.

    methods    includes plain decoding; see ``with_baseline``
    n_predict  maximum tokens per run
    repeat     runs of each method on each prompt
    raw        use prompts as plain text, without the chat template
    thinking   turns reasoning on or off, for chat templates that support it; None = their default
    """

    methods: Sequence[Method]
    sampling: SamplingParams
    n_predict: int
    repeat: int = 1
    raw: bool = False
    thinking: bool | None = None

    def rotated(self, n: int) -> list[Method]:
        """The methods in the order of the ``n``-th round."""
        start = n % len(self.methods)
        return [*self.methods[start:], *self.methods[:start]]


def with_baseline(methods: Sequence[Method]) -> list[Method]:
    """``methods`` without duplicates; plain decoding is added in front if missing."""
    unique = {str(method): method for method in methods}
    if BASELINE not in unique:
        unique = {BASELINE: parse_method(BASELINE), **unique}
    return list(unique.values())


def warm_up(engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> None:
    """Measure the cost of a decode, and run every method once on the first prompt that fits, so
    that broken methods fail here.

    Raises InvalidParameter if no prompt fits the context.
    """
    engine.prepare()
    for prompt in prompts:
        tokens = prompt_tokens(engine, [{"role": "user", "content": prompt.turns[0]}], plan)
        if _too_long(engine, tokens, plan) is None:
            with engine.resources.memory.paused():
                for method in plan.methods:
                    n_predict = min(plan.n_predict, WARM_UP_TOKENS)
                    generate(engine, tokens, method, plan.sampling, n_predict)
            return
    raise InvalidParameter(
        f"none of the {len(prompts)} prompts leaves room for {plan.n_predict} tokens in a context "
        f"of {engine.context.n_ctx}; raise --ctx or lower --n-predict"
    )


def measure(engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> Iterator[list[Run] | Skipped]:
    """Yield each round (one run of every method on a prompt) and each skipped turn.

    A turn is remembered after all its rounds, with plain decoding's reply: all methods and repeats
    have the same memory.
    """
    memory = engine.resources.memory
    n_rounds = 0
    for prompt in prompts:
        conversation: list[Message] = []
        for turn, text in enumerate(prompt.turns, start=1):
            conversation.append({"role": "user", "content": text})
            tokens = prompt_tokens(engine, conversation, plan)
            reason = _too_long(engine, tokens, plan)
            if reason is not None:  # later turns are longer still
                for later in range(turn, len(prompt.turns) + 1):
                    yield Skipped(prompt.turn_id(later), prompt.category, reason)
                break
            baseline: Sequence[int] = ()  # plain decoding's tokens
            reply = ""
            for repeat in range(plan.repeat):
                with memory.paused():
                    done = {
                        str(method): generate(engine, tokens, method, plan.sampling, plan.n_predict)
                        for method in plan.rotated(n_rounds)
                    }
                n_rounds += 1
                if not repeat:  # later ones of plain decoding are compared with the first as well
                    baseline, reply = done[BASELINE].token_ids, done[BASELINE].text
                yield [
                    Run(
                        method=str(method),
                        prompt_id=prompt.turn_id(turn),
                        category=prompt.category,
                        repeat=repeat,
                        tokens=written.token_ids,
                        finish_reason=written.finish_reason,
                        stats=written.stats,
                        first_difference=_difference(engine, baseline, written),
                    )
                    for method in plan.methods
                    for written in (done[str(method)],)
                ]
            memory.remember([*tokens, *baseline])
            conversation.append({"role": "assistant", "content": reply})


def prompt_tokens(engine: Engine, conversation: Sequence[Message], plan: Plan) -> list[int]:
    """Token ids of a conversation whose last message is the user's.

    Uses the chat template or, if ``plan.raw``, the messages as plain text, one per line.
    """
    if plan.raw:
        return engine.model.tokenize("\n".join(message["content"] for message in conversation))
    return chat_prompt(engine.model, conversation, thinking=plan.thinking).tokens


def plain_logits(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> Floats:
    """Logits after ``prompt`` and ``text`` in plain decoding, ``(n_vocab,)``.

    Prefills the prompt and decodes the text token by token as the baseline does, so these are
    exactly the logits it sampled from.
    """

    def decode() -> Floats:
        cache = engine.cache
        cache.truncate(0)
        cache.reserve(1)
        reading = Reading(cache, prompt[:-1], defer=True)
        while (rows := reading.next_rows()) is not None:
            reading.take(cache.target.decode(rows))
        cache.target.want_logits(True)
        for token in [prompt[-1], *text]:
            rows = tree_rows(TokenTree(token), cache.n_past, cache.n_seq)
            output = cache.target.decode(cache.with_deferred(rows))
            cache.commit(rows, [0])
        return output.logits(0).copy()

    return engine.call(decode)


def generate(
    engine: Engine, tokens: Sequence[int], method: Method, sampling: SamplingParams, n_predict: int
) -> Reply:
    """Generate after an empty cache, so that every method prefills the whole prompt."""
    engine.call(lambda: engine.cache.truncate(0))
    return engine.generate(tokens, method=method, sampling=sampling, max_tokens=n_predict).run()


def _difference(engine: Engine, baseline: Sequence[int], done: Reply) -> Difference | None:
    """Where the text diverges from ``baseline``, plain decoding's token ids."""
    index = first_difference(baseline, done.token_ids)
    if index is None:
        return None
    ar_token, token = ([*ids, None][index] for ids in (baseline, done.token_ids))
    gap = None
    if ar_token is not None and token is not None:
        logits = plain_logits(engine, done.prompt, baseline[:index])
        gap = float(logits[ar_token] - logits[token])
    return Difference(index, ar_token, token, gap)


def _too_long(engine: Engine, tokens: Sequence[int], plan: Plan) -> str | None:
    needed, n_ctx = len(tokens) + plan.n_predict, engine.context.n_ctx
    if needed <= n_ctx:
        return None
    return (
        f"{len(tokens)} prompt tokens plus --n-predict {plan.n_predict} exceed the context of "
        f"{n_ctx}; raise --ctx to {needed} or lower --n-predict"
    )
