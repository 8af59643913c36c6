"""Request: what is asked of an engine. It never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batching.errors import InvalidParameter, hints_of, require_types
from speculation.drafter import Method
from speculation.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Request:
    """A prompt and its settings, checked.

    prompt      token ids, at least one
    max_tokens  None = no limit; with 0 the prompt is read into the cache, and nothing is generated
    opening     the opening mark of the reasoning if the prompt ends with it; else empty
    reuse       whether what is cached of the prompt is taken over
    record      whether the text keeps its steps
    on_disk     whether an engine that keeps texts on disk may keep this one
    scored      called in the engine's thread with the log probabilities of the prompt's next tokens
                as they are read, the second first; ``logprobs`` says of how many likely tokens, too
    """

    prompt: tuple[int, ...]
    method: Method
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    progress: Callable[[int, int], None] | None = None
    waiting: Callable[[int], None] | None = None
    logprobs: int | None = None
    post_sampling: bool = False
    prediction: tuple[int, ...] = ()
    memory: str | None = ""
    opening: str = ""
    reuse: bool = True
    record: bool = False
    on_disk: bool = True
    scored: Callable[[Sequence[TokenLogprobs]], object] | None = None

    def __post_init__(self) -> None:
        require_types(vars(self), hints_of(Request))
        if not self.prompt:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidParameter(
                f"max_tokens is {self.max_tokens}; give 0 or more, or None for no limit"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidParameter(f"logprobs is {self.logprobs}; give 0 or more")
        if not all(self.stop):
            raise InvalidParameter("a stop string is empty; leave it out")

    @property
    def reads_all(self) -> bool:
        """Whether the whole prompt is read anew."""
        return self.scored is not None or not self.reuse
