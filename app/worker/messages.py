"""Messages between the server and the engine's process: requests, events and what is published.

Frozen dataclasses of strings, numbers, bytes, tuples and mappings. ``wire`` has their written form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from speculation.chat.tool_format import GENERIC, ToolFormat
from speculation.registry.model_spec import ModelSpec as ModelSpec
from speculation.settings import DEFAULT_METHOD

# llama-server's, so that its clients get the same texts.
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True)
class LoadedModel:
    """The loaded model.

    n_ctx                 tokens that one text may have
    load                  counts loads: speeds of different loads are not comparable
    has_thinking_switch   whether a request's ``thinking`` has an effect
    computed_by           a sentence: which device computes, and why not the GPU if there is one
    can_draft             whether it can drop rejected drafts; some recurrent models cannot
    """

    spec: ModelSpec
    description: str
    n_ctx: int
    load: int
    has_thinking_switch: bool = False
    computed_by: str = ""
    can_draft: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """What the endpoint says of the loaded model.

    parallel       how many texts are written at a time
    chat_template  as the GGUF has it
    ends           tokens that end a text
    longest        bytes of the longest token, at least; 0 = not known
    fim            the marks for filling in the middle, by name, with their tokens
    embedding_model  the path of the one that is loaded beside the model, or empty
    missing  methods that cannot run with their usual parameters, with what they need: the setting
             ``draft_model`` or ``heads``, other ``parameters``, or another ``model``
    sampling  the sampling that the model's authors recommend, as fields of ``SamplingParams``
    devices  the GPUs that the model may use, with their free bytes when no model was loaded
    n_threads  that decode
    gpu_layers  how many layers are on GPUs, and how many there are
    """

    parallel: int = 1
    path: str = ""
    chat_template: str = ""
    bos: str = ""
    eos: str = ""
    ends: tuple[int, ...] = ()
    n_vocab: int = 0
    n_ctx_train: int = 0
    n_embd: int = 0
    n_params: int = 0
    n_bytes: int = 0
    longest: int = 0
    fim: Mapping[str, int] = field(default_factory=dict)
    embedding_model: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[tuple[str, int], ...] = ()
    n_threads: int = 0
    gpu_layers: tuple[int, int] = (0, 0)
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """The loaded model, a load's progress, and why the last load failed; sent when it changes.

    failed   the model of that load; empty if the error is another one
    is_down  the engine's process has ended, and the model is on its way back
    """

    model: LoadedModel | None = None
    loading: Loading | None = None
    error: str | None = None
    facts: ModelFacts = ModelFacts()
    is_down: bool = False
    failed: str = ""


@dataclass(frozen=True)
class LeftOut:
    """The prompt leaves out the ``n_turns`` oldest turns to fit a context of ``n_ctx`` tokens."""

    n_turns: int = 0
    n_ctx: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to reply to, or a prompt to continue. ``id`` is what ``stop`` takes.

    messages    ``{"role": "system" | "user" | "assistant" | "tool", "content": "..."}``, with
                ``tool_calls`` as in OpenAI's API
    prompt      texts and token ids to continue instead; messages are then empty
    method      a method with its parameters as on the command line, ``lookahead:window=5``
    sampling    fields of SamplingParams; missing ones keep their defaults
    max_tokens  None: until the context is full
    stop        strings that end the reply
    thinking    whether to reason before the answer, if the model supports it; None: its default
    thinking_budget  the most tokens of reasoning; None: no limit
    leave_out   whether to leave out the oldest turns if not all fit
    left_out    what the previous request left out
    logprobs    how many of the likeliest tokens to give with each token; None: no probabilities
    post_sampling  give the probabilities that tokens are drawn with, instead of the model's
    tools       functions that the model may call, as in OpenAI's API; those with ``in_message`` are
                defined in a message
    tool_choice  ``auto``, ``none``, ``required``, a function or ``allowed_tools``, as in OpenAI's
                API
    parallel_tool_calls  whether it may call several
    template_kwargs  more variables for the chat template
    continue_last  whether a last message of the assistant is continued; None: unless it has calls
    begun       tokens that the reply begins with
    prediction  what the reply is expected to be, for the most part
    memory      the texts to draft from: a client's own by its name, "" for those that all clients
                share, None for none
    on_disk     whether the conversation may be kept on disk (``ModelSpec.keep_texts``)
    show_prompt  give the prompt as the model reads it, in ``Done``
    reuse       whether what is cached of the prompt is taken over
    echo        the prompt's text, if the reply begins with it; with ``logprobs``, the prompt's
                tokens come with their probabilities, too. None: it does not
    predict_seconds  after so long from the first token on, a new line ends the reply; 0: never
    n_indent    spaces or tabs that a line after the first must begin with; one with fewer ends the
                reply, and is not in it
    record      whether the reply's steps come with its tokens, and ``Done`` has ``decode_ms``
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    method: str = DEFAULT_METHOD
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    thinking: bool | None = None
    leave_out: bool = True
    left_out: LeftOut = LeftOut()
    prompt: tuple[str | int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    post_sampling: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool | None = None
    begun: tuple[int, ...] = ()
    prediction: str = ""
    memory: str | None = ""
    on_disk: bool = True
    show_prompt: bool = False
    thinking_budget: int | None = None
    reuse: bool = True
    echo: str | None = None
    predict_seconds: float = 0.0
    n_indent: int = 0
    record: bool = False

    @property
    def listed_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the template lists, at the prompt's beginning."""
        return tuple(tool for tool in self.tools if not tool.get("in_message"))


@dataclass(frozen=True)
class Waiting:
    """``n_ahead`` other requests must end first; ``loading`` if one of them loads a model."""

    n_ahead: int
    loading: bool = False


@dataclass(frozen=True)
class Loading:
    """A load's progress.

    stage  ``download`` (``done`` and ``total`` in bytes) or ``load`` (in percent)
    """

    model: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """The end of a successful load."""

    model: LoadedModel


@dataclass(frozen=True)
class Prefill:
    """Progress of the prompt: ``done`` of ``total`` tokens are decoded."""

    done: int
    total: int


@dataclass(frozen=True)
class Opening:
    """How to read the reply.

    mark   the opening mark of reasoning, if the prompt ends with it; else empty
    calls  how the model writes calls of tools
    """

    mark: str
    calls: ToolFormat = GENERIC


@dataclass(frozen=True)
class Chance:
    """A token and its log probability; NaN: it has none, being a prompt's first."""

    id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True)
class Tokens:
    """More of a reply: for each token, the characters it completed and whether it was drafted.

    ids      the tokens
    chances  for each token its own and those of the likeliest tokens, if the request asks for them
    """

    pieces: tuple[tuple[str, bool], ...]
    ids: tuple[int, ...] = ()
    chances: tuple[tuple[Chance, tuple[Chance, ...]], ...] = ()


class Node(NamedTuple):
    """A draft of a step, as ``speculation.meter.Draft``: its token as text.

    A token by itself may be half a character; it is then "\\ufffd".
    """

    parent: int
    piece: str
    source: str


class StepRecord(NamedTuple):
    """A step of a reply, as ``speculation.meter.RecordedStep``, with tokens as texts.

    bonus  the token that the model added; empty if the text ended before it or with it
    """

    draft_ms: float
    decode_ms: float
    accept_ms: float
    n_rows: int
    n_texts: int
    nodes: tuple[Node, ...]
    path: tuple[int, ...]
    bonus: str


@dataclass(frozen=True)
class Steps:
    """More of a reply's steps, if the request asks for them; they come before their tokens. The
    first step of a reply also decodes the end of the prompt."""

    records: tuple[StepRecord, ...]


@dataclass(frozen=True)
class PromptTokens:
    """The next tokens of the prompt. ``chances`` as in ``Tokens``."""

    chances: tuple[tuple[Chance, tuple[Chance, ...]], ...]


@dataclass(frozen=True)
class Done:
    """The end of a reply, with its counters, which ``speculation.meter`` explains.

    finish_reason  ``stop``, ``length``, ``context`` or ``cancelled``
    stop_string    the stop string that ended it; empty if none did
    prompt         as the model reads it, if the request asks for it
    decode_ms      milliseconds that a decode of 1, 2, … rows takes at the reply's end, as learnt so
                   far, if the request asks for its steps; empty if that is not known
    """

    finish_reason: str
    method: str = ""
    model: LoadedModel | None = None
    n_prompt: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    n_first: int = 0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_string: str = ""
    prompt: str = ""
    decode_ms: tuple[float, ...] = ()
    n_read: int = 0
    first_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The end of a request that failed.

    message        for the user of the page
    flags_message  the same with settings named as flags
    kind           ``invalid`` request, ``too long`` a prompt, ``no model``, ``busy``, ``late``,
                   ``error``
    param          the request's field that is wrong, if it is known
    requested      of a prompt that is too long, its tokens …
    available      … and how many there can be
    """

    message: str
    flags_message: str = ""
    kind: str = "error"
    requested: int = 0
    available: int = 0
    param: str | None = None


@dataclass(frozen=True)
class Tokenize:
    """A text to turn into tokens; answered with ``tokens``, whose bytes are empty if nobody needs
    them: a million take a second on their way."""

    text: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = True


@dataclass(frozen=True)
class Detokenize:
    """Tokens to turn into text; answered with ``text``."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Render:
    """A request whose prompt is to be shown; answered with the ``text`` that the model reads, and
    the number of its tokens, ``n_tokens``."""

    request: ChatRequest


@dataclass(frozen=True)
class Embed:
    """Texts to turn into vectors, each as texts and token ids in turn; answered with ``vectors``
    and the number of all their tokens, ``n_tokens``."""

    texts: tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True)
class Unload:
    """Free the model; answered when that is done. The process stays."""


@dataclass(frozen=True)
class Answer:
    """The end of a question. ``tokens`` are ids and bytes, ``vectors`` 32-bit floats each."""

    text: str = ""
    n_tokens: int = 0
    tokens: tuple[tuple[int, bytes], ...] = ()
    vectors: tuple[bytes, ...] = ()


class Asking(NamedTuple):
    """What asking a source of ``auto`` brings on average: accepted tokens, and the milliseconds
    that it takes and gains. One that ``tells`` how likely its draft is is asked if that is enough,
    others if asking gains time."""

    source: str
    tokens: float
    ms: float
    gain_ms: float
    tells: bool


@dataclass(frozen=True)
class Drafting:
    """What drafts cost and bring, as known at the end of the last reply.

    load       of which load of a model, as in ``LoadedModel``; 0: nothing is known
    decode_ms  as in ``Done``
    pays_from  percent from which drafts pay, if each is accepted with it; above 100: never
    """

    load: int = 0
    decode_ms: tuple[float, ...] = ()
    pays_from: int = 0
    sources: tuple[Asking, ...] = ()


@dataclass(frozen=True)
class Report:
    """What the engine does, and has done since its process started; sent after changes, at most 10
    times a second.

    running   the ids of the requests that have a slot
    n_waiting  how many others there are
    n_read    prompt tokens that were read
    n_later   tokens after the first of each text
    prefill_seconds  of reading prompts
    decode_seconds  of writing the later tokens
    n_drafts  steps with drafts
    accepted  at each position of a draft, how many steps accepted it
    """

    running: tuple[str, ...] = ()
    n_waiting: int = 0
    n_read: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    n_later: int = 0
    n_steps: int = 0
    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_longest: int = 0
    accepted: tuple[int, ...] = ()
    drafting: Drafting = Drafting()


@dataclass(frozen=True)
class Cancel:
    """Stop the request with this message's number. Its last event still comes."""


@dataclass(frozen=True)
class Close:
    """Stop everything and end the process."""


BEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Beat:
    """The process is alive; sent every ``BEAT_SECONDS``.

    overdue  what takes longer there than it should; or empty
    """

    overdue: str = ""


Question = Tokenize | Detokenize | Render | Embed | Unload
LAST = (Loaded, Done, Answer, Failed)  # one of these ends a request
Event = (
    Waiting
    | Loading
    | LeftOut
    | Opening
    | PromptTokens
    | Prefill
    | Steps
    | Tokens
    | Loaded
    | Done
    | Answer
    | Failed
)
