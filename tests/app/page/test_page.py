"""The page without a browser: rendered turns, fields, settings and flags."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.page.conversation import Reply, Settings, Turn
from app.page.render import GrowingReply, text_html, turn_html
from app.page.session import Session
from app.worker.backend import Backend, Parameter
from app.worker.events import Events
from app.worker.messages import ModelSpec, Status, Tokens
from speculation.registry import PAIRED, ModelEntry
from speculation.sampling import SamplingParams
from speculation.settings import DEFAULT_METHOD
from tests.support.fake_backend import DONE, MODEL, FakeBackend, run, talk
from tests.support.local_backend import LocalBackend

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from app.page import fields as page_fields
    from app.page import model_panel
    from app.start import main, parse_flags


VALUES = {"method": "ar", "max_tokens": 0, "system": "", "compare": False, "thinking": ""}
REASONING = "<details><summary>Reasoning</summary><p>hm</p>\n</details>"


def said(text: str, opening: str = "") -> Reply:
    return Reply("x", [(text, False)], opening=opening)


# Rendering


@pytest.mark.parametrize(
    ("text", "opening", "html"),
    [
        ("**a** `<b>`", "", "<p><strong>a</strong> <code>&lt;b&gt;</code></p>\n"),
        (
            "![x](http://example.org/x.png)",
            "",
            '<p>!<a href="http://example.org/x.png" target="_blank" rel="noopener noreferrer">'
            "x</a></p>\n",
        ),
        ("[x](javascript:alert(1))", "", "<p>[x](javascript:alert(1))</p>\n"),
        (
            "```\na < b\n```",
            "",
            '<div class="code"><pre><code>a &lt; b\n</code></pre><span class="actions">'
            '<button type="button" data-action="copy-code">Copy</button></span></div>',
        ),
        ("<think>\nhm\n</think>\n\nyes", "", f"{REASONING}<p>yes</p>\n"),
        ("<think>hm", "", REASONING),
        ("hm", "<think>\n", REASONING),
        ("hm\n</think>\n\nyes", "<think>\n", f"{REASONING}<p>yes</p>\n"),
        ("<think>\n\n</think>\n\nyes", "", "<p>yes</p>\n"),
        ("<|channel|>final<|message|>yes", "", "<p>yes</p>\n"),
    ],
)
def test_markdown_is_rendered_and_reasoning_collapsed(text: str, opening: str, html: str) -> None:
    assert text_html(said(text, opening)) == html


def test_drafted_tokens_are_in_spans_and_everything_is_escaped() -> None:
    pieces = [("<b>", False), (" **a", True), (" &", True), (" b**\n", False), ("c", True)]
    assert text_html(Reply("x", pieces)) == (
        '<p>&lt;b&gt;<span class="drafted" data-n="2"> </span>'
        '<strong><span class="drafted" data-n="2">a &amp;</span> b</strong><br />\n'
        '<span class="drafted" data-n="1">c</span></p>\n'
    )
    # Drafts of two steps stay apart even if the token between them is empty.
    html = text_html(Reply("x", [("a", True), ("", False), ("é", True)]))
    assert html.count('<span class="drafted"') == 2


def test_drafts_are_marked_in_reasoning_and_answer() -> None:
    pieces = [("<think>", False), ("\nhm", True), ("", True), (".</think>", True), ("\n", False)]
    whole = text_html(Reply("x", [*pieces, ("yes", True)]))
    assert whole == REASONING.replace("hm", '<span class="drafted" data-n="3">hm.</span>') + (
        '<p><span class="drafted" data-n="1">yes</span></p>\n'
    )
    assert text_html(Reply("x", pieces[:2]), GrowingReply()) == (
        REASONING.replace("hm", '<span class="drafted" data-n="1">hm</span>')
    )


def test_html_of_a_model_or_a_user_shows_as_text() -> None:
    text = '<script>alert(1)</script> <b>x</b> <img src="http://example.org/x.png">'
    turn = Turn(text, Reply("<i>", [(text, False)], error="<u>"))
    html = turn_html(turn, live=False, last=True)
    for tag in ("<script", "<b>", "<img", "<i>", "<u>"):
        assert tag not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2


def test_replies_name_their_model_if_there_are_several() -> None:
    tab = Session(talk("one", "two"))
    assert not any("m.gguf" in html for html in tab.html())
    other = dataclasses.replace(MODEL, spec=ModelSpec("models/other.gguf"))
    reply = tab.conversation.turns[1].reply
    assert reply is not None
    reply.done = dataclasses.replace(DONE, model=other)
    first, second = tab.html()
    assert "<code>m.gguf</code>" in first
    assert "<code>other.gguf</code>" in second


def test_only_the_last_turn_can_be_undone_and_copy_leaves_out_its_reasoning() -> None:
    turn = Turn("hi", said("<think>hm</think>\n**yes**"))
    assert "data-action" not in turn_html(turn, live=True, last=True)
    assert "Undo" not in turn_html(turn, live=False, last=False)
    html = turn_html(turn, live=False, last=True)
    assert "Undo" in html
    assert 'data-source="**yes**"' in html


# Settings


def method_fields(backend: Backend, chosen: str) -> page_fields.Fields:
    """The page's fields, made in a running event loop, or Gradio leaves one open."""

    async def make() -> page_fields.Fields:
        fields = page_fields.Fields()
        with gr.Blocks():
            page_fields.method_fields(fields, backend.methods(), chosen)
            page_fields.sampling_fields(fields)
        return fields

    return asyncio.run(make())


def test_unchanged_fields_mean_the_defaults() -> None:
    fields = method_fields(FakeBackend(), "guess:width=8")
    names = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name, component in fields.components.items():
        if name.startswith("sampling.") and component.value not in ("", None, page_fields.RANDOM):
            assert component.value == names[name.removeprefix("sampling.")], name
    values = {name: component.value for name, component in fields.components.items()}
    settings = read(**(values | {"system": None}))
    assert settings.method == "guess:width=8"
    assert settings.max_tokens == 1024
    SamplingParams(**settings.sampling)


def read(**values: object) -> Settings:
    return page_fields.read_settings(VALUES | {"leave_out": True} | values, FakeBackend().methods())


def test_settings_read_what_was_changed() -> None:
    values = {
        "guess.width": 2,
        "guess.deep": False,
        "sampling.temperature": 0.5,
        "sampling.seed": 3,
        "sampling.grammar": "",
        "sampling.top_k": None,
    }
    given = {"method": "guess", "system": "s", "compare": True, "thinking": "off"}
    assert read(**given, **values, leave_out=False) == Settings(
        "guess:width=2,deep=off", {"temperature": 0.5, "seed": 3}, None, "s", True, False, False
    )
    # Empty max tokens keeps its default, and 0 means no limit.
    assert [read(max_tokens=n).max_tokens for n in (None, 0, 7.0)] == [1024, None, 7]


def test_a_random_seed_is_drawn_only_for_sampling() -> None:
    for temperature in (0.0, 1.0):
        chosen = {"sampling.temperature": temperature, "sampling.seed": page_fields.RANDOM}
        drawn = [read(**chosen).sampling["seed"] for _ in range(2)]
        assert (drawn[0] == drawn[1]) == (temperature == 0)
        assert all(0 <= seed < page_fields.N_SEEDS for seed in drawn)


def test_a_tab_renders_finished_turns_once_and_again_after_a_change() -> None:
    tab = Session(talk("one", "two"))
    first = tab.html()
    assert [html is again for html, again in zip(first, tab.html(), strict=True)] == [True, True]
    tab.conversation.ask("three")
    tab.busy = True
    assert [("Undo" in html, "live" in html) for html in tab.html()] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    run(tab.conversation, FakeBackend([Tokens((("new", False),)), DONE]))
    tab.busy = False
    assert "new" in tab.html()[2]
    tab.conversation.retry(2)
    run(tab.conversation, FakeBackend([Tokens((("newer", False),)), DONE]))
    assert "newer" in tab.html()[2]
    tab.conversation.undo()
    assert tab.html() == first


def test_every_method_has_its_fields_in_the_page() -> None:
    backend = LocalBackend()
    fields = method_fields(backend, "prompt-lookup")
    lookahead = next(info for info in backend.methods() if info.name == "lookahead")
    backend.close()
    assert lookahead.parameters[0] == Parameter("window", 15, "W: columns of the window")
    assert fields.components["lookahead.window"].value == 15


def test_saved_values_are_used_if_they_are_valid_for_their_field() -> None:
    fields = method_fields(FakeBackend(), "guess:width=8")
    kept = {
        "method": "ar",
        "guess.width": 2,
        "guess.deep": False,
        "sampling.temperature": 7,
        "sampling.mirostat": 2,
        "sampling.top_k": None,
        "sampling.grammar": "a",
    }
    wrong = {
        "method": "gone",
        "guess.width": 2.5,
        "guess.deep": 1,
        "sampling.temperature": "hot",
        "sampling.mirostat": True,
        "sampling.top_k": True,
        "sampling.grammar": None,
        "gone": 1,
    }

    def taken(**data: object) -> dict[str, object]:
        names = {component: name for name, component in fields.components.items()}
        found = fields.updates(json.dumps(data))
        return {names[component]: update["value"] for component, update in found.items()}

    in_range = kept | {"sampling.temperature": 2.0}
    assert taken(tab=kept) == in_range
    given = {"method", "guess.width", "guess.deep"}
    assert taken(browser=kept) == {name: in_range[name] for name in kept if name not in given}
    assert taken(tab=wrong) == taken(browser=wrong) == taken(tab=[1]) == taken(browser=None) == {}
    assert [fields.updates(text) for text in ("", "{", "[]", "3", "null")] == [{}] * 5
    assert (fields.defaults["method"], fields.defaults["guess.width"]) == (DEFAULT_METHOD, 4)


# The program


def model_fields(backend: Backend) -> model_panel.ModelPanel:
    async def make() -> model_panel.ModelPanel:
        with gr.Blocks():
            return model_panel.ModelPanel(backend, ModelSpec("small"))

    return asyncio.run(make())


def test_choosing_another_model_replaces_draft_model_and_heads_by_its_own() -> None:
    class Backend(FakeBackend):
        def models(self) -> tuple[ModelEntry, ...]:
            return (
                ModelEntry("big", Path("b.gguf"), "small", "8 GB", ("a", "b")),
                ModelEntry("small", Path("s.gguf"), None, ""),
            )

    panel = model_fields(Backend())
    note, draft, heads = panel.follow("big", "other", ["x"])
    assert "8 GB; draft model: small; drafting heads: a, b" in note
    assert (draft["value"], heads["value"]) == ("small", ["a", "b"])
    for chosen in (("big", "", []), ("/a/path.gguf", "other", ["x"])):
        _, draft, heads = panel.follow(*chosen)
        assert (draft["value"], heads["value"]) == ("", [])


def test_the_header_shows_a_short_reason_for_a_failed_load_beside_the_old_model() -> None:
    for status, model, told in (
        (Status(MODEL, error="no x.gguf\nm.gguf is loaded as before."), True, "no x.gguf"),
        (Status(MODEL, error="y" * 161), True, f"{'y' * 159}…"),
        (Status(error="y" * 161), False, "y" * 161),
    ):
        html, error = (
            model_panel.status_html(status),
            f'<div class="error" role="alert">{told}</div>',
        )
        assert html.endswith(error) and "<b>m.gguf</b>" in html if model else html == error


def test_quotes_around_a_pasted_path_are_removed() -> None:
    wanted = []

    class Backend(FakeBackend):
        def load(self, spec: ModelSpec, request_id: str = "") -> Events:
            wanted.append((spec.model, spec.draft_model, spec.heads))
            return super().load(spec)

    panel = model_fields(Backend())
    quoted = r'"C:\My models\m.gguf"'
    tab: Any = SimpleNamespace(session_hash="1")
    list(panel._run(quoted, " ", [quoted], 0, tab))
    assert wanted == [(r"C:\My models\m.gguf", None, (r"C:\My models\m.gguf",))]


def test_flags_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse_flags(["--model", "m.gguf", "--method", "lookahead:window=5", "--no-browser"])
    assert (flags.host, flags.port, flags.ctx, flags.model) == ("127.0.0.1", None, 0, "m.gguf")
    assert (flags.draft_model, flags.heads) == (None, [])
    assert (flags.method, parse_flags([]).method) == ("lookahead:window=5", None)
    paired = parse_flags(["--draft-model", "--heads"])
    assert (paired.draft_model, paired.heads) == (PAIRED, [PAIRED])
    with pytest.raises(SystemExit):
        parse_flags(["--method", "lokahead"])
    assert "did you mean lookahead?" in capsys.readouterr().err
    for wrong, told in (
        ("--ctx -5", "n_ctx is -5; give 0 (the model's own) to 2147483392"),
        ("--threads 0", "n_threads is 0; give 1 to 512"),
        ("--threads 100000", "n_threads is 100000; give 1 to 512"),
        ("--gpu-layers -5", "--gpu-layers is -5; give 0 or more"),
        ("--keep-texts -5", "--keep-texts is -5; give 0 or more"),
        ("--kv-type q8_0 --flash-attn off", "a q8_0 KV cache needs flash attention"),
    ):
        with pytest.raises(SystemExit):
            parse_flags(wrong.split())
        assert f"error: {told}" in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused_before_trying_any_port() -> None:
    with pytest.raises(SystemExit, match=r"--host 192\.0\.2\.1 is not an address of this machine"):
        main(["--host", "192.0.2.1"])
