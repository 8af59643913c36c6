"""The app without a browser: conversations, rendering, settings, the backend on a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from app.backend import (
    Backend,
    ChatRequest,
    Done,
    Event,
    Failed,
    Loaded,
    LoadedModel,
    Loading,
    LocalBackend,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Parameter,
    Prefill,
    Status,
    Text,
    Waiting,
)
from app.chat import Conversation, PlainRun, Reply, Settings, Turn, follow, markdown, stats_line
from app.render import coloured_html, markdown_html, turn_html
from batching.context import ContextParams
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from tests.hub_server import HubServer
from tests.tiny_gguf import write_tiny_gguf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from app import fields as page_fields
    from app import ui
    from app.__main__ import parse_flags

MODEL = LoadedModel(ModelSpec("m.gguf"), "llama 7M", 2048, True, 1)
DONE = Done(
    "stop",
    "prompt-lookup",
    MODEL,
    n_prompt=228,
    n_tokens=84,
    n_steps=40,
    n_drafted=107,
    n_accepted=44,
    decode_seconds=1.0,
)
ENDLESS = {"grammar": "root ::= [a-z] root"}


class FakeBackend:
    """Says what the script says, one list of events a reply."""

    def __init__(self, *script: Iterable[Event]) -> None:
        self.script = list(script)
        self.requests: list[ChatRequest] = []

    def methods(self) -> tuple[MethodInfo, ...]:
        return (
            MethodInfo("ar", "Autoregressive", ()),
            MethodInfo("guess", "Guess", (Parameter("width", 4, ""), Parameter("deep", True, ""))),
        )

    def models(self) -> tuple[ModelInfo, ...]:
        return ()

    def status(self) -> Status:
        return Status(MODEL)

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        yield Loaded(MODEL)

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        self.requests.append(request)
        yield from self.script.pop(0)

    def stop(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def run(conversation: Conversation, backend: Any, **settings: Any) -> Reply:
    for _ in conversation.answer(backend, Settings(**settings), "tab"):
        pass
    reply = conversation.turns[-1].reply
    assert reply is not None
    return reply


def talk(*texts: str) -> Conversation:
    conversation = Conversation()
    for text in texts:
        conversation.ask(text)
        run(conversation, FakeBackend([Text(((f"re: {text}", False),)), DONE]))
    return conversation


def method_fields(backend: Backend, chosen: str) -> page_fields.Fields:
    """The page's fields, made in a running event loop: else Gradio makes one and leaves it open."""

    async def make() -> page_fields.Fields:
        fields = page_fields.Fields()
        with ui.gr.Blocks():
            page_fields.method_fields(fields, backend.methods(), chosen)
            page_fields.sampling_fields(fields)
        return fields

    return asyncio.run(make())


# Conversations


def test_messages_hold_the_system_prompt_and_all_turns() -> None:
    conversation = talk("one")
    conversation.ask("two")
    assert conversation.messages(" Be brief. ") == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "re: one"},
        {"role": "user", "content": "two"},
    )


def test_a_turn_that_failed_is_not_told_to_the_model() -> None:
    conversation = Conversation()
    conversation.ask("one")
    assert run(conversation, FakeBackend([Failed("no model")])).error == "no model"
    conversation.ask("two")
    assert conversation.messages() == ({"role": "user", "content": "two"},)


def test_undo_gives_the_last_message_back() -> None:
    conversation = talk("one", "two")
    assert conversation.undo() == "two"
    assert [turn.user for turn in conversation.turns] == ["one"]
    conversation.undo()
    assert conversation.undo() == ""


def test_retry_and_edit_drop_what_follows() -> None:
    conversation = talk("one", "two", "three")
    conversation.retry(1)
    assert conversation.turns == [conversation.turns[0], Turn("two")]
    conversation.edit(0, "uno")
    assert conversation.turns == [Turn("uno")]


def test_a_reply_tells_of_waiting_and_of_the_prompt_and_then_shows_text() -> None:
    conversation, seen = Conversation(), []
    conversation.ask("hi")
    events = [Waiting(1), Waiting(2), Waiting(1, loading=True), Prefill(512, 900)]
    backend = FakeBackend([*events, Text((("yes", True),)), DONE])
    for _ in conversation.answer(backend, Settings(), "tab"):
        reply = conversation.turns[-1].reply
        assert reply is not None
        seen.append(reply.notice or reply.text)
    assert list(dict.fromkeys(seen)) == [
        "",
        "Waiting: 1 reply before yours",
        "Waiting: 2 replies before yours",
        "Waiting: a model is being loaded",
        "Reading the prompt: 512 of 900 tokens",
        "yes",
    ]


def test_text_is_gathered_between_updates() -> None:
    now = iter(range(0, 100_000, 1))
    text: list[str] = []

    def apply(event: Event) -> None:
        assert isinstance(event, Text)
        text.extend(piece for piece, _ in event.pieces)

    events = (Text(((letter, False),)) for letter in "abcdefgh")
    seen = ["".join(text) for _ in follow(events, apply, lambda: next(now) / 100)]
    assert seen == ["a", "abcdefg", "abcdefgh"]


def test_comparing_runs_the_same_request_by_plain_decoding() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    backend = FakeBackend([Text((("yes", True),)), DONE], [Text((("yes", False),)), plain])
    reply = run(conversation, backend, sampling={"seed": 7}, compare=True)
    assert [request.method for request in backend.requests] == ["prompt-lookup", "ar"]
    assert backend.requests[1].sampling == {"seed": 7}
    assert backend.requests[1].max_tokens == 84
    assert reply.plain == PlainRun(42.0, "yes")
    assert stats_line(reply).startswith("84 tok/s · 2.0× plain, same text · ")


def test_a_plain_reply_is_what_a_retry_is_compared_with() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    run(conversation, FakeBackend([Text((("yes", False),)), plain]), method="ar")
    conversation.retry(0)
    reply = run(conversation, FakeBackend([Text((("yes!", False),)), DONE]))
    assert "2.0× plain, other text" in stats_line(reply)


def test_nothing_is_compared_that_was_not_measured() -> None:
    stopped = dataclasses.replace(DONE, method="ar", finish_reason="cancelled")
    for second in ([stopped], [Failed("no")]):
        conversation = Conversation()
        conversation.ask("hi")
        reply = run(conversation, FakeBackend([DONE], second), compare=True)
        assert "plain" not in stats_line(reply)
        assert not conversation.plain_runs


def test_the_stats_line_says_what_a_reply_cost() -> None:
    reply = Reply("prompt-lookup", done=DONE)
    assert stats_line(reply) == (
        "84 tok/s · 2.1 tokens per step · 41 % of drafts accepted · context 312 / 2048"
    )
    slow = dataclasses.replace(DONE, decode_seconds=20.0, n_drafted=0, finish_reason="length")
    assert stats_line(Reply("ar", done=slow)) == (
        "4.2 tok/s · 2.1 tokens per step · context 312 / 2048 · length limit"
    )
    full = dataclasses.replace(DONE, n_prompt=1965, n_drafted=0, finish_reason="context")
    assert stats_line(Reply("ar", done=full)).endswith(" · context 2048 / 2048 · context full")
    assert stats_line(Reply("ar", done=Done("cancelled"))) == "stopped"
    assert stats_line(Reply("ar")) == ""
    assert stats_line(Reply("ar", [("a", True), ("b", False)])) == "2 tokens · 1 drafted"


def test_a_conversation_can_be_exported() -> None:
    assert markdown(talk("one")) == (
        "## You\n\none\n\n## Model\n\nre: one\n\n<sub>prompt-lookup · 84 tok/s · "
        "2.1 tokens per step · 41 % of drafts accepted · context 312 / 2048</sub>\n"
    )


# Rendering


def test_drafted_tokens_are_in_spans_and_everything_is_escaped() -> None:
    pieces = [("<b>", False), (" a", True), (" &", True), (" b\n", False), ("c", True)]
    assert coloured_html(Reply("x", pieces)) == (
        "&lt;b&gt;"
        '<span class="drafted" title="2 drafted tokens accepted in one step"> a &amp;</span>'
        " b\n"
        '<span class="drafted" title="1 drafted token accepted in one step">c</span>'
    )


def test_runs_of_two_steps_stay_apart_where_the_token_between_shows_nothing_yet() -> None:
    html = coloured_html(Reply("x", [("a", True), ("", False), ("é", True)]))
    assert html.count('<span class="drafted"') == 2


@pytest.mark.parametrize("coloured", [True, False])
def test_html_of_a_model_or_a_user_shows_as_text(coloured: bool) -> None:
    text = '<script>alert(1)</script> <b>x</b> <img src="http://example.org/x.png">'
    turn = Turn(text, Reply("<i>", [(text, False)], error="<u>"))
    html = turn_html(turn, coloured=coloured, live=False, last=True)
    for tag in ("<script", "<b>", "<img", "<i>", "<u>"):
        assert tag not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2


def test_markdown_is_rendered_but_loads_nothing_and_runs_nothing() -> None:
    assert markdown_html("**a** `<b>`") == "<p><strong>a</strong> <code>&lt;b&gt;</code></p>\n"
    assert markdown_html("![x](http://example.org/x.png)") == (
        '<p>!<a href="http://example.org/x.png">x</a></p>\n'
    )
    assert "<a" not in markdown_html("[x](javascript:alert(1))")


def test_thoughts_are_folded_also_while_they_go_on() -> None:
    assert markdown_html("<think>\nhm\n</think>\n\nyes") == (
        "<details><summary>Thoughts</summary><p>hm</p>\n</details><p>yes</p>\n"
    )
    assert markdown_html("<think>hm") == (
        "<details><summary>Thoughts</summary><p>hm</p>\n</details>"
    )


def test_a_live_turn_offers_no_actions_and_only_the_last_can_be_undone() -> None:
    turn = Turn("hi", Reply("ar", [("yes", False)]))
    assert "data-action" not in turn_html(turn, coloured=True, live=True, last=True)
    assert "Undo" not in turn_html(turn, coloured=True, live=False, last=False)
    assert "Undo" in turn_html(turn, coloured=True, live=False, last=True)


# Settings


def test_fields_left_as_they_are_keep_the_defaults() -> None:
    fields = method_fields(FakeBackend(), "guess:width=8")
    names = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name, component in fields.components.items():
        if name.startswith("sampling.") and component.value not in ("", None, page_fields.RANDOM):
            assert component.value == names[name.removeprefix("sampling.")], name
    values = {name: component.value for name, component in fields.components.items()}
    settings = page_fields.read_settings(
        values | {"system": None, "compare": False}, FakeBackend().methods()
    )
    assert settings.method == "guess:width=8"
    assert settings.max_tokens == 1024
    SamplingParams(**settings.sampling)


def test_settings_read_what_was_changed() -> None:
    values = {
        "method": "guess",
        "guess.width": 2,
        "guess.deep": False,
        "sampling.temperature": 0.5,
        "sampling.seed": 3,
        "sampling.grammar": "",
        "sampling.top_k": None,
        "max_tokens": 0,
        "system": "s",
        "compare": True,
    }
    assert page_fields.read_settings(values, FakeBackend().methods()) == Settings(
        "guess:width=2,deep=off", {"temperature": 0.5, "seed": 3}, None, "s", True
    )


def test_a_random_seed_is_drawn_only_where_there_is_chance() -> None:
    values = {"method": "ar", "max_tokens": 0, "system": "", "compare": False}
    for temperature in (0.0, 1.0):
        chosen = {"sampling.temperature": temperature, "sampling.seed": page_fields.RANDOM}
        drawn = [
            page_fields.read_settings(values | chosen, FakeBackend().methods()).sampling["seed"]
            for _ in range(2)
        ]
        assert (drawn[0] == drawn[1]) == (temperature == 0)
        assert all(0 <= seed < page_fields.N_SEEDS for seed in drawn)


def test_a_tab_renders_finished_turns_once_and_anew_when_something_changed() -> None:
    tab = ui.Session(talk("one", "two"))
    first = tab.html()
    assert [html is again for html, again in zip(first, tab.html(), strict=True)] == [True, True]
    tab.coloured = False
    assert "markdown" in tab.html()[0]
    tab.coloured = True
    tab.conversation.ask("three")
    tab.busy = True
    assert [("Undo" in html, "live" in html) for html in tab.html()] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    run(tab.conversation, FakeBackend([Text((("new", False),)), DONE]))
    tab.busy = False
    assert "new" in tab.html()[2]
    tab.conversation.retry(2)
    run(tab.conversation, FakeBackend([Text((("newer", False),)), DONE]))
    assert "newer" in tab.html()[2]
    tab.conversation.undo()
    assert tab.html() == first


def test_every_event_and_request_is_plain_json(backend: LocalBackend) -> None:
    events = list(backend.reply(request("hi", max_tokens=3)))
    for value in (*events, backend.status(), *backend.methods(), request("hi"), Waiting(1)):
        assert json.loads(json.dumps(dataclasses.asdict(value)))


def test_flags_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse_flags(["--model", "m.gguf", "--method", "lookahead:window=5", "--no-browser"])
    assert (flags.host, flags.port, flags.ctx, flags.model) == ("127.0.0.1", None, 0, "m.gguf")
    with pytest.raises(SystemExit):
        parse_flags(["--method", "lokahead"])
    assert "did you mean lookahead?" in capsys.readouterr().err


# The backend on a tiny model


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a reply long enough to be stopped."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long") / "long.gguf", n_ctx=32768)


def spec(path: Path | str, n_ctx: int = 0) -> ModelSpec:
    return ModelSpec(str(path), n_ctx=n_ctx, n_threads=1, flash_attn="off")


@pytest.fixture(scope="module")
def loaded(long_model: Path) -> Iterator[LocalBackend]:
    made = LocalBackend()
    assert isinstance(list(made.load(spec(long_model, 32768)))[-1], Loaded)
    yield made
    made.close()


@pytest.fixture
def backend(loaded: LocalBackend, long_model: Path) -> LocalBackend:
    """A backend that holds the long model and is idle."""
    model = loaded.status().model
    assert model is not None
    assert model.spec.model == str(long_model)
    return loaded


def request(text: str, id_: str = "tab", **options: Any) -> ChatRequest:
    return ChatRequest(id_, ({"role": "user", "content": text},), **options)


def text_of(events: Iterable[Event]) -> str:
    return "".join(text for event in events if isinstance(event, Text) for text, _ in event.pieces)


def test_a_reply_is_what_the_engine_says(backend: LocalBackend, long_model: Path) -> None:
    events = list(backend.reply(request("a cat", max_tokens=20)))
    params = ContextParams(n_ctx=32768, n_threads=1, flash_attn="off")
    with Engine.load(long_model, params) as engine:
        expected = engine.chat("a cat", max_tokens=20).run().text
    done = events[-1]
    assert isinstance(done, Done)
    assert (text_of(events), done.n_tokens, done.method) == (expected, 20, "auto")
    assert isinstance(events[0], Prefill)


def test_characters_that_span_tokens_arrive_whole(backend: LocalBackend) -> None:
    sampling = {"grammar": 'root ::= "naïve 漢字 😀!"'}
    for method in ("ar", "prompt-lookup"):
        events = list(backend.reply(request("hi", method=method, sampling=sampling)))
        assert text_of(events) == "naïve 漢字 😀!"
        assert all("\ufffd" not in text_of([event]) for event in events)


def test_stop_ends_a_reply_and_leaves_the_model_ready(backend: LocalBackend) -> None:
    seen: list[Event] = []
    for event in backend.reply(request("hi", sampling=ENDLESS)):
        seen.append(event)
        if isinstance(event, Text):
            backend.stop("tab")
    done = seen[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    assert text_of(backend.reply(request("hi", max_tokens=5)))


def test_a_reply_that_nobody_reads_any_more_ends(backend: LocalBackend) -> None:
    events = backend.reply(request("hi", sampling=ENDLESS))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert isinstance(list(backend.reply(request("hi", max_tokens=2)))[-1], Done)


def test_a_second_reply_waits_its_turn_and_is_told_so(backend: LocalBackend) -> None:
    first = backend.reply(request("hi", "one", sampling=ENDLESS))
    next(first)
    second = backend.reply(request("ho", "two", max_tokens=3))
    assert next(second) == Waiting(1)
    third = backend.reply(request("he", "three"))
    assert next(third) == Waiting(2)
    backend.stop("three")
    assert list(third) == [Done("cancelled", "auto")]
    backend.stop("one")
    assert isinstance(list(second)[-1], Done)
    assert isinstance(list(first)[-1], Done)


def test_whoever_waits_for_a_load_is_told_so(long_model: Path) -> None:
    backend, go = LocalBackend(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.backend.resolve", lambda model, **_: go.wait() and Path(model))
        load = backend.load(spec(long_model, 512))
        next(load)
        reply = backend.reply(request("hi", max_tokens=2))
        assert next(reply) == Waiting(1, loading=True)
        go.set()
        assert isinstance(list(load)[-1], Loaded)
        assert isinstance(list(reply)[-1], Done)
    backend.close()


def test_what_cannot_run_fails_with_its_reason(backend: LocalBackend) -> None:
    for options, reason in (
        ({"method": "lookahead:window=0"}, "window is 0; give 1 to 128"),
        ({"sampling": {"top_p": 3}}, "top_p is 3; give 0.0 to 1.0"),
        ({"sampling": {"grammar": "nonsense"}}, "the grammar does not parse"),
    ):
        (failed,) = (e for e in backend.reply(request("x", **options)) if isinstance(e, Failed))  # type: ignore[arg-type]
        assert reason in failed.message


def test_a_load_that_fails_leaves_the_old_model_usable(tiny_model: Path, tmp_path: Path) -> None:
    backend = LocalBackend()
    list(backend.load(spec(tiny_model)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:20_000])
    for wrong, reason in ((tmp_path / "none.gguf", "no file"), (broken, "is incomplete")):
        failed = list(backend.load(spec(wrong)))[-1]
        assert isinstance(failed, Failed)
        assert reason in failed.message
        status = backend.status()
        assert status.error == failed.message
        assert status.model is not None
        assert status.model.spec.model == str(tiny_model)
        assert isinstance(list(backend.reply(request("x", max_tokens=2)))[-1], Done)
    backend.close()


def test_batches_are_traced(tiny_model: Path, tmp_path: Path) -> None:
    backend = LocalBackend(trace_batches=tmp_path / "trace.jsonl")
    list(backend.load(spec(tiny_model)))
    list(backend.reply(request("x", max_tokens=3, method="ar")))
    backend.close()
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert len(lines) == 4  # the prompt but for its last token, and a step for each token
    assert json.loads(lines[-1])


def test_without_a_model_a_reply_says_why(tmp_path: Path) -> None:
    backend = LocalBackend()
    list(backend.load(spec(tmp_path / "none.gguf")))
    (failed,) = backend.reply(request("hi"))
    assert isinstance(failed, Failed)
    assert "no model is loaded" in failed.message
    assert "none.gguf" in failed.message
    assert "none.gguf" in ui._header(backend.status())
    backend.close()


def test_a_download_tells_how_far_it_is_and_can_be_stopped(tmp_path: Path) -> None:
    backend = LocalBackend()

    def resolve(model: str, *, bar: Any) -> Path:
        made = bar(total=2_000_000_000, desc=model, unit="B")
        made.update(500_000_000)
        backend.stop("tab/load")
        made.update(1)
        raise AssertionError("it was stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.backend.resolve", resolve)
        events = list(backend.load(ModelSpec("big"), "tab/load"))
    assert [ui._loading(event) for event in events[:-1]] == [  # type: ignore[arg-type]
        "Loading big: 0 %",
        "Downloading big: 0.50 of 2.00 GB",
    ]
    assert events[-1] == Failed("loading big was stopped")
    backend.close()


def test_a_model_of_the_hub_is_fetched_and_loaded_and_its_bytes_are_counted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    content = tiny_model.read_bytes()
    with HubServer() as hub:
        hub.add("owner/repo", "tiny.gguf", content)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        backend = LocalBackend()
        events = list(backend.load(spec("hf:owner/repo/tiny.gguf")))
        close_session()
    bytes_done = [e.done for e in events if isinstance(e, Loading) and e.stage == "download"]
    assert bytes_done == sorted(bytes_done)
    assert bytes_done[-1] == len(content)
    assert isinstance(events[-1], Loaded)
    assert isinstance(list(backend.reply(request("x", max_tokens=2)))[-1], Done)
    backend.close()


def test_every_method_of_the_table_can_be_set_up_in_the_page() -> None:
    backend = LocalBackend()
    fields = method_fields(backend, "prompt-lookup")
    lookahead = next(info for info in backend.methods() if info.name == "lookahead")
    assert lookahead.parameters[0] == Parameter("window", 15, "W: columns of the window")
    assert fields.components["lookahead.window"].value == 15
    backend.close()


def test_the_answers_of_the_page_forbid_the_browser_to_leave() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    coroutine = ui._StayHere(app)({}, None, send)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert sent[0]["headers"] == [(b"content-security-policy", ui.POLICY.encode())]
