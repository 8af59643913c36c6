"""A child process for templates and grammars: reads JSON requests, writes JSON answers, by lines.

``speculation.sandbox`` runs this file with the import path as its arguments. It imports nothing
from this project, so that it starts quickly, and it exits at the end of its input.

A request has the limits ``seconds`` (of a processor), ``memory`` (bytes) and ``characters``. With a
``template`` and ``variables``, the answer is the rendered ``text``; without variables, the
``names`` of those that the template reads. With a ``grammar``, the answer is its ``problem``, empty
if it has none, and the ``seconds`` that took; with the ids of ``special`` tokens and ``n_vocab``, a
text is begun, too. If that fails, the answer is ``error``, a message, or ``exceeded``, the name of
the limit; what takes too long ends the process. The first line of output is "ready".
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_ERROR_LENGTH = 500
_WATCH_SECONDS = 60.0  # that this process outlives its parent
# A grammar's nesting that overflows it overflows no stack of the parent's, which are larger.
_STACK = 1 << 20
_STEP_SECONDS = 0.25  # of a processor, for a token; other texts wait meanwhile


class _Generation(Extension):
    """Ignores ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Arguments(dict[str, Any]):
    """The arguments of a tool call. As text they are JSON, for templates that expect a string."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _with_arguments(found: dict[str, Any]) -> dict[str, Any]:
    if isinstance(found.get("arguments"), dict):
        found["arguments"] = _Arguments(found["arguments"])
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` of transformers, for which chat templates are written: Jinja's own escapes
    HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_environment.filters["tojson"] = _to_json


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        _write("ready")
        for line in sys.stdin.buffer:
            request = json.loads(line, object_hook=_with_arguments)
            if "grammar" in request:
                import llguidance  # noqa: F401 - before the time counts
            # If the parent has died, nobody else stops a template in an endless loop.
            faulthandler.dump_traceback_later(_WATCH_SECONDS, exit=True, file=nowhere)
            _limit_time(request["seconds"])
            with _limited_memory(request["memory"]):
                answer = _answer(request)
            _limit_time(0)
            faulthandler.cancel_dump_traceback_later()
            _write(answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "grammar" in request:
            return _in_thread(lambda: _try_grammar(**request))
        if "variables" in request:
            return _render(request["template"], request["variables"], request["characters"])
        syntax = _environment.parse(request["template"])
        return {"names": sorted(meta.find_undeclared_variables(syntax))}
    except MemoryError:
        return {"exceeded": "memory"}
    except Exception as error:  # a template can raise anything
        return {"error": str(error)[:_ERROR_LENGTH]}


def _render(template: str, variables: dict[str, Any], characters: int) -> dict[str, Any]:
    variables = {
        "date_string": _strftime_now("%d %b %Y"),  # Llama 3.1's default is a day in July 2024
        **variables,
        "raise_exception": _refuse,
        "strftime_now": _strftime_now,
    }
    pieces = []
    for piece in _compiled(template).generate(variables):
        pieces.append(piece)
        characters -= len(piece)
        if characters < 0:
            return {"exceeded": "characters"}
    return {"text": "".join(pieces)}


def _try_grammar(
    grammar: str, special: dict[str, int] | None, n_vocab: int, **_: Any
) -> dict[str, Any]:
    """Read it; unless ``special`` is None, also compile it and begin a text, as the engine does,
    but byte by byte."""
    from llguidance import LLMatcher

    start = time.process_time()
    if special is None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        seconds = time.process_time() - start
        return {"problem": messages[0] if is_error else "", "seconds": seconds}
    matcher = LLMatcher(_tokenizer(tuple(special.items()), n_vocab), grammar, log_level=0)
    compiled = time.process_time()
    for step in (matcher.compute_ff_tokens, matcher.compute_logit_bias):
        if not matcher.is_error():
            step()
    end = time.process_time()
    problem = matcher.get_error()
    if end - compiled > _STEP_SECONDS:
        problem = f"its first token takes {end - compiled:.2g} s"
    return {"problem": problem, "seconds": end - start}


class _Bytes:
    """A vocabulary of bytes and special tokens, as llguidance's TokenizerWrapper reads it."""

    bos_token_id = None

    def __init__(self, special: Sequence[tuple[str, int]], n_vocab: int) -> None:
        texts = {token: name.encode() for name, token in special}
        n = max(n_vocab, 1 + max(texts, default=0)) + 257
        free = iter([token for token in range(n) if token not in texts])
        self._of_byte = {bytes([byte]): next(free) for byte in range(256)}
        self.eos_token_id = next(free)
        texts[self.eos_token_id] = b"<end>"
        texts.update((token, text) for text, token in self._of_byte.items())
        self.tokens = [texts.get(token, b"") for token in range(n)]
        self.special_token_ids = [self.eos_token_id, *[token for _, token in special]]

    def __call__(self, data: bytes) -> list[int]:
        return [self._of_byte[data[i : i + 1]] for i in range(len(data))]


@lru_cache(maxsize=8)
def _tokenizer(special: Sequence[tuple[str, int]], n_vocab: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Bytes(special, n_vocab)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens))


def _in_thread(work: Any) -> dict[str, Any]:
    """What ``work`` returns, in a thread with a small stack."""
    found: list[dict[str, Any]] = []
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def _limit_time(seconds: float) -> None:
    """End the process once it has used so much of a processor; 0 = not any more."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


@contextlib.contextmanager
def _limited_memory(n_bytes: int) -> Iterator[None]:
    """Make allocations beyond ``n_bytes`` fail with MemoryError, if the system supports it."""
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses; the hard limit may be lower
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)


def _write(answer: object) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
