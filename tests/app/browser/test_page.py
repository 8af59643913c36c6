"""The page around a conversation: chats, settings, replay, race, keyboard, sizes and its cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.app.browser.chat import DONE, LAST, Chat
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

LOCKED = "(options) => options.filter(({ disabled }) => disabled).map(({ label }) => label)"


def test_chats_are_found_named_pinned_moved_exported_and_deleted(chat: Chat) -> None:
    page = chat.page
    for name in ("a red fox", "a <b>blue</b> hen"):
        chat.new_chat()
        chat.ask(name)
    chat.wait_for_titles("a <b>blue</b> hen", "a red fox")
    page.fill("#search", "blue he")
    page.wait_for_selector("#found:has-text('hit')")
    assert page.inner_html("#list .snippet >> nth=0").startswith("a &lt;b&gt;<mark>blue</mark>")
    page.click("#list .hit a >> nth=0")
    page.wait_for_selector(".turn.user:has-text('blue')")
    page.fill("#search", "")
    page.wait_for_selector("#list .row:not(.hit)")

    chat.open_row_menu("a red fox")
    chat.choose("Rename")
    page.fill("dialog input", "Reynard")
    page.keyboard.press("Enter")
    chat.wait_for_titles("a <b>blue</b> hen", "Reynard")
    chat.open_row_menu("Reynard")
    chat.choose("Pin")
    chat.wait_for_titles("Reynard", "a <b>blue</b> hen")
    assert page.inner_text("#list h3 >> nth=0") == "Pinned"
    assert chat.focused() == "Actions for Reynard"  # it has moved

    chat.open_row_menu("Reynard")
    with page.expect_download() as download:
        chat.choose("Export as Markdown")
    assert download.value.suggested_filename == "Reynard.md"
    assert "a red fox" in Path(download.value.path()).read_text(encoding="utf-8")
    chat.open_row_menu("Reynard")
    chat.choose("Delete")
    page.wait_for_selector("#notice:has-text('Deleted “Reynard”')")
    chat.wait_for_titles("a <b>blue</b> hen")
    page.click("#notice button")
    chat.wait_for_titles("Reynard")

    page.click("#more")
    with page.expect_file_chooser() as chooser:
        chat.choose("Import chats")
    exported = '{"title": "from elsewhere", "create_time": 7, "mapping": {}}'
    wrong = {"name": "x.json", "mimeType": "application/json", "buffer": exported.encode()}
    chooser.value.set_files(wrong)
    page.wait_for_selector("#alert:has-text('it has no chats of this program')")


SCRIPT = (
    """'"></script><img src=x onerror="ran = 1"><svg onload="ran = 1"><script>ran = 1</script>"""
)
LINK = (
    "[a](javascript:ran=1) <javascript:ran=1> [b]: javascript:ran=1 $\\href{javascript:ran=1}{x}$"
)


def test_no_script_of_an_imported_chat_or_of_the_routes_answers_runs(chat: Chat) -> None:
    page = chat.page
    said = {"parent": None, "role": "user", "text": SCRIPT, "state": "done", "created_at": 1.0}
    kinds = (f"<think>{SCRIPT}</think>{SCRIPT}", LINK, f"```{SCRIPT}\n{SCRIPT}\n```")
    reply = dict.fromkeys(("method", "model", "error", "sentence"), SCRIPT)
    reply |= {"figures": [[SCRIPT, SCRIPT]]}  # type: ignore[dict-item]
    told = {**said, "parent": 0, "role": "assistant", "text": "\n\n".join(kinds), "reply": reply}
    files = [{"name": SCRIPT, "text": SCRIPT}]
    about = {"id": "x", "title": SCRIPT, "settings": {"system": SCRIPT}}
    times = {"created_at": 1.0, "changed_at": 2.0, "is_named": True, "is_pinned": True, "leaf": 1}
    hostile = {**about, **times, "turns": [{**said, "files": files}, told]}
    file = {"format": "speculation-chats", "version": 2, "chats": [hostile]}
    steps = {"sources": [SCRIPT], "steps": [[0, SCRIPT, 0, SCRIPT, 2, [[-1, SCRIPT, 0]], [0], "a"]]}
    page.route("**/turns/*/steps", lambda route: route.fulfill(json=steps))

    def with_cells(route: Any) -> None:
        found = route.fetch().json()
        found["turns"][1]["cells"] = [[SCRIPT, SCRIPT]]
        route.fulfill(json=found)

    page.route("**/page/chats/*?limit=30", with_cells)
    post = "(file) => fetch('page/import', { method: 'POST', body: JSON.stringify(file) })"
    page.evaluate(post, file)
    page.click("#list a:has-text('onerror')")
    page.wait_for_selector(f"{LAST} .thoughts summary")
    page.click(f"{LAST} .cells")
    page.wait_for_selector("#replay-error")  # they are no numbers
    page.click("#close-drawer")
    page.click("#show-settings")
    page.wait_for_selector("#fields button:has-text('Sampling')")
    page.fill("#search", "onerror")
    page.wait_for_selector("#list .hit mark")
    page.click(".turn.user .files button")
    page.wait_for_selector("dialog pre")
    made = "(html) => document.body.insertAdjacentHTML('beforeend', html)"
    page.evaluate(made, '<img src=x onerror="ran = 1"><a id=link href="javascript:ran = 1">x</a>')
    page.evaluate("document.querySelector('#link').click()")
    page.wait_for_function("[...document.images].at(-1).complete")
    assert page.locator("#turns :is(img, script, svg[onload], a[href^=javascript])").count() == 0
    assert page.evaluate("typeof ran") == "undefined"


def test_settings_are_kept_with_their_chat_and_presets_bring_them_back(chat: Chat) -> None:
    page = chat.page
    locked = page.locator("#method option").evaluate_all(LOCKED)
    assert {"Medusa (needs drafting heads)", "Draft model (needs a draft model)"} <= {*locked}
    assert "Lookahead" not in locked
    page.select_option("#method", "prompt-lookup")
    chat.ask("a cat")
    page.click("#show-settings")
    page.click("#fields button:has-text('Parameters of Prompt lookup')")
    page.get_by_label("Most tokens to look up").fill("2")
    page.click("#fields button:has-text('Sampling')")
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        page.get_by_label("Most tokens of a reply").fill("7")
    page.click("#presets button")
    chat.choose("Save these settings as a preset")
    page.fill("dialog input", "Short")
    page.keyboard.press("Enter")
    page.wait_for_selector("#presets option:text-is('Short')", state="attached")
    page.click("#close-drawer")
    chat.ask("more", 4)
    page.click(f"{LAST} .speed [aria-label=Figures]")
    assert page.inner_text(f"{LAST} dd >> nth=0") == "prompt-lookup:max_ngram=2"

    chat.new_chat()
    page.select_option("#method", "ar")
    chat.ask("a dog")
    chat.reload()
    assert page.input_value("#method") == "ar"
    page.click("#list a:has-text('a cat')")
    page.wait_for_function("document.querySelector('#method').value === 'prompt-lookup'")
    page.click("#list a:has-text('a dog')")
    page.wait_for_function("document.querySelector('#method').value === 'ar'")
    page.click("#show-settings")
    page.select_option("#presets select", label="Short")
    page.wait_for_function("document.querySelector('#method').value === 'prompt-lookup'")
    page.click("#presets button")
    chat.choose("Delete “Short”")
    page.wait_for_selector("#presets option:text-is('Short')", state="detached")


def test_a_model_is_loaded_and_one_that_fails_leaves_the_last_one(
    chat: Chat, model: Path, tmp_path: Path
) -> None:
    page = chat.page
    told = CHAT_TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}a{% endif %}"
    thinks = write_tiny_gguf(tmp_path / "thinks.gguf", chat_template=told, n_ctx=32768)

    def with_a_package(route: Any) -> None:
        found = route.fetch().json()
        hint = {"is_here": False, "can_download": False, "trouble": "run pip"}
        found["models"].append({**found["models"][-1], "name": "x", "title": "packed", **hint})
        route.fulfill(json=found)

    page.route("**/page/models?*", with_a_package)
    page.click("#model")
    page.wait_for_selector(f".model:has-text('{model.stem}'):has-text('loaded')")
    page.wait_for_selector(".model:has-text('packed'):has-text('run pip')")

    def load(name: str) -> None:
        page.fill("[aria-label='Path or name of a model']", name)
        page.press("[aria-label='Path or name of a model']", "Enter")

    page.set_viewport_size({"width": 1280, "height": 440})
    load(str(tmp_path / "none.gguf"))
    failed = ".model:has(b:text-is('none')) .error:has-text('none.gguf')"
    page.wait_for_selector(failed)
    is_in_view = "(one) => one.getBoundingClientRect().bottom <= innerHeight"
    assert page.eval_on_selector(failed, is_in_view)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_selector("#model-error:has-text('none.gguf')")
    other = page.context.new_page()  # nobody asked for it there
    other.goto(page.url)
    other.wait_for_selector("[data-ready]")
    assert other.is_hidden("#model-error")
    other.close()
    page.click(f"{failed} >> text=Dismiss")
    page.wait_for_selector("#model-error", state="hidden")
    assert not page.query_selector(failed)
    assert page.inner_text("#model-name") == model.stem
    load(str(thinks))
    page.wait_for_selector("#model-name:has-text('thinks')")
    page.click("#browse")
    page.wait_for_selector(f".folder >> text={thinks.name}")
    page.keyboard.press("Escape")
    page.click("#show-settings")
    page.wait_for_selector("#field-thinking", state="visible")
    page.click("#model")
    load(str(model))
    page.wait_for_selector(f"#model-name:has-text('{model.stem}')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#field-thinking", state="hidden")


def test_a_reply_is_written_again_by_the_model_that_is_chosen(
    chat: Chat, model: Path, tmp_path: Path
) -> None:
    page, other = chat.page, write_tiny_gguf(tmp_path / "other.gguf", n_ctx=32768)
    chat.ask("a cat")

    def answer_with(name: str, *, n: int) -> None:
        page.wait_for_selector(f"{DONE} .siblings:has-text('{n}/{n}')")
        page.wait_for_selector("dialog.models", state="detached")
        page.click(f"{DONE} .speed [aria-label=Figures]")
        assert name in page.locator(f"{LAST} dd").all_inner_texts()

    chat.act("Retry")
    chat.choose("With another model")
    page.fill("[aria-label='Path or name of a model']", str(other))
    page.press("[aria-label='Path or name of a model']", "Enter")
    answer_with("other", n=2)
    chat.act("Retry")
    chat.choose("With another model")
    page.click(f".model:has-text('{model.stem}') >> text=Answer")
    answer_with(model.stem, n=3)
    assert page.inner_text("#model-name") == model.stem


def test_a_reply_waits_for_its_model_while_none_is_loaded(chat: Chat) -> None:
    page, held = chat.page, list[Any]()
    chat.ask("a cat")
    page.route("**/page/events*", lambda route: held.append(route))
    page.route("**/page/models/load", lambda route: route.fulfill(json={}))
    chat.reload()
    chat.act("Retry")
    chat.choose("With another model")
    page.fill("[aria-label='Path or name of a model']", "x.gguf")
    page.press("[aria-label='Path or name of a model']", "Enter")
    page.wait_for_selector("dialog.models", state="detached")
    status = page.evaluate("fetch('page/state').then((answer) => answer.json())")["status"]
    loading = {"model": "x.gguf", "title": "x", "stage": "load", "done": 0, "total": 100}
    model = {**status["model"], "load": 99, "spec": {**status["model"]["spec"], "model": "x.gguf"}}
    told = ({"loading": loading}, {"model": None}, {"model": model})
    events = [f"event: status\ndata: {json.dumps({**status, **one})}\n\n" for one in told]
    with page.expect_request("**/retry"):
        held[-1].fulfill(body="".join(events), content_type="text/event-stream")


HTML = """```html
<h1>Hello</h1><img src="/health"><link rel="stylesheet" href="/page/page.css">
<meta http-equiv="refresh" content="0;url=/health"><script>parent.ran = 1</script>
```"""


def test_code_is_downloaded_and_previewed_without_scripts_or_requests(chat: Chat) -> None:
    page = chat.page
    chat.ask(f"{HTML}\n\n# not a heading")
    assert page.inner_text(".said p") == "# not a heading"
    head, code = (f".said .code {part}" for part in (".actions", "pre"))
    edge = "(one) => one.getBoundingClientRect().{}"
    assert page.eval_on_selector(head, edge.format("bottom")) <= page.eval_on_selector(
        code, edge.format("top")
    )
    with page.expect_download() as download:
        page.click(f"{head} >> text=Download")
    assert download.value.suggested_filename == "code.html"
    assert Path(download.value.path()).read_text() == "\n".join(HTML.split("\n")[1:-1]) + "\n"
    page.click(f"{head} >> text=Wrap")
    chat.reload()
    assert page.eval_on_selector(code, "(one) => getComputedStyle(one).whiteSpace") == "pre-wrap"
    chat.asked.clear()
    page.click(f"{head} >> text=Preview")
    frame = page.frame_locator("dialog iframe")
    page.wait_for_selector("dialog >> text=Its scripts do not run here")
    frame.locator("h1").wait_for()
    page.wait_for_timeout(300)
    assert frame.locator("h1").inner_text() == "Hello"
    # A request that the policy refuses is seen here, too, but has no response.
    asked = [one for one in chat.asked if one.frame != page.main_frame]
    assert [one.url for one in asked if one.response() is not None] == []
    assert len(asked) > 0
    assert page.evaluate("typeof ran") == "undefined"
    assert page.get_attribute("dialog iframe", "sandbox") == ""


def test_drafted_runs_tell_where_they_are_from_and_a_system_prompt_is_of_its_chat(
    chat: Chat,
) -> None:
    page = chat.page
    page.select_option("#method", "prompt-lookup")
    chat.set(**{"sampling.grammar": 'root ::= ("the " ("fox" | "hen") " "){9}'})
    sentence = chat.ask("the fox the fox")
    assert "tokens/s" in sentence
    page.focus(LAST)
    page.keyboard.press("Enter")
    told = page.inner_text("#tip")
    assert told.endswith(" in one step, given by the format")
    page.keyboard.press("Escape")
    page.click("#system summary")
    page.fill("#system textarea", "Be brief.")
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        pass
    chat.new_chat()
    assert page.is_hidden("#system")
    assert page.input_value("#method") == "auto"
    page.go_back()
    page.wait_for_selector("#system summary:has-text('System prompt: Be brief.')")
    page.click("#show-settings")
    page.click("#presets button")
    chat.choose("Start new chats with these settings")
    chat.new_chat()
    page.wait_for_selector("#system summary:has-text('System prompt: Be brief.')")
    chat.set(max_tokens=2**40)
    chat.say("x")
    page.wait_for_selector("#field-max_tokens [aria-invalid=true]")
    page.goto(f"{page.url.split('#')[0]}#chat=../none")
    page.wait_for_selector("#alert:has-text('This chat does not exist')")


def test_earlier_turns_come_by_scrolling(chat: Chat) -> None:
    page = chat.page
    said = {
        "parent": None,
        "role": "user",
        "text": "word " * 60,
        "state": "done",
        "created_at": 1.0,
    }
    turns = [{**said, "parent": n - 1 if n else None} for n in range(70)]
    about = {"id": "x", "title": "long", "settings": {}, "created_at": 1.0, "changed_at": 2.0}
    told = {**about, "is_named": True, "is_pinned": False, "leaf": 69, "turns": turns}
    file = {"format": "speculation-chats", "version": 2, "chats": [told]}
    page.evaluate(
        "(file) => fetch('page/import', { method: 'POST', body: JSON.stringify(file) })", file
    )
    page.click("#list a:has-text('long')")
    for n in (30, 60, 70):
        page.wait_for_function(f"document.querySelectorAll('#turns > .turn').length === {n}")
        page.evaluate("document.querySelector('#transcript').scrollTop = 0")
    page.fill("#search", "word")
    page.wait_for_selector("#found:has-text('1 hit')")
    page.evaluate("sets = 0, Storage.prototype.setItem = () => sets++")
    page.type("#box", "a few words")
    assert page.evaluate("sets") < 3  # a draft is not written at each key


def test_a_replay_shows_each_step_by_mouse_and_keys(chat: Chat) -> None:
    page = chat.page
    page.select_option("#method", "prompt-lookup")
    chat.set(**{"sampling.grammar": 'root ::= ("the " ("fox" | "hen") " "){9}'})
    chat.ask("the fox the fox")
    page.focus(f"{LAST} .cells")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'scrubber'")
    page.wait_for_function(  # nothing is lost between the conversation and the drawer
        "document.querySelector('#transcript').getBoundingClientRect().right ==="
        " document.querySelector('#right').getBoundingClientRect().left"
    )
    n = int(page.get_attribute("#scrubber", "max"))
    drafted = named = 0
    for step in range(1, n + 1):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f"#step-title:has-text('Step {step + 1} of {n + 1}:')")
        drafted += page.locator("#tree b").count()
        named += page.locator("#tree :is(b, em):has([aria-hidden]:text-is('␣')) .unseen").count()
        stays = page.evaluate(
            """() => {
              const tree = document.querySelector("#tree"), label = tree.querySelector("small");
              tree.style.width = "60px";
              tree.scrollLeft = 20;
              const [from, at] = [tree, label].map((one) => one?.getBoundingClientRect().left);
              tree.style.width = "";
              return !label || at >= from;
            }"""
        )
        assert stays  # who drafted
    assert drafted > 0
    assert named > 0
    said = page.evaluate("document.activeElement.ariaValueText")
    assert said == page.inner_text("#step-title")
    assert page.get_attribute("#step-title", "aria-live") == "off"  # not announced twice
    page.get_by_role("button", name="Previous step").click()
    assert page.get_attribute("#step-title", "aria-live") == "polite"
    assert page.inner_text("#tree small >> nth=0").strip() != ""
    page.keyboard.press("Home")
    page.select_option("#slow", "1")
    page.click("#play")
    page.wait_for_selector(f"#step-title:has-text('Step {n + 1} of')")
    page.wait_for_selector("#play[aria-label=Play]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#right:not(.open)")
    page.wait_for_function("document.activeElement.matches('.cells')")


def test_a_race_is_shown_played_and_told_among_the_requests(chat: Chat) -> None:
    page = chat.page
    chat.set(max_tokens=12)
    page.click(".race-card >> nth=0")
    for lane in (0, 1):
        page.wait_for_selector(f".lane-text:not(:empty) >> nth={lane}")
    page.wait_for_selector(".verdict b")
    assert page.inner_text(".verdict b") == "Too short for a number"
    assert page.locator(".lane.over").count() == 2
    page.get_by_role("button", name="Play again").click()
    page.wait_for_selector(".verdict b")
    page.get_by_role("button", name="Race again").click()
    page.wait_for_selector(".verdict b")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.race", state="detached")
    page.click("#more")
    chat.choose("Requests")
    page.wait_for_selector(".sheet td:text-is('race')")
    assert page.locator(".curve polyline").count() == 1
    assert page.locator(".sheet button").count() == 0
    with page.expect_response("**/requests/texts"):
        page.click("text=Keep the texts of your requests")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.requests", state="detached")
    chat.ask("a fox in the sheet")
    page.click("#more")
    chat.choose("Requests")
    page.click(".sheet button >> nth=0")
    page.wait_for_selector("[aria-label=Prompt]:has-text('a fox in the sheet')")
    with page.expect_response("**/requests/texts"):
        page.click("text=Keep the texts of your requests")
    page.wait_for_selector(".sheet button", state="detached")


def test_the_message_box_is_near_by_keyboard_and_shortcuts_work(chat: Chat) -> None:
    page = chat.page
    chat.ask("a cat")
    chat.ask("a dog", 4)
    chat.reload()
    stops = page.evaluate(
        """() => [...document.querySelectorAll("a, button, input, select, textarea, [tabindex]")]
          .filter((one) => one.tabIndex >= 0 && !one.disabled)
          .filter((one) => one.checkVisibility({ visibilityProperty: true }))
          .map((one) => one.id || one.className)"""
    )
    assert stops[0] == "skip"
    assert stops.index("box") <= 12, stops
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert chat.focused() == "box"
    assert page.locator("#turns > .turn").count() == 4  # of the same chat
    page.keyboard.press("Control+k")
    assert chat.focused() == "search"
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector("#start .card")
    page.focus("#list a")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    page.focus(f"{LAST} [aria-label=Retry]")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.matches('.turn')")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[aria-label=Shortcuts][open]")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    page.wait_for_selector("#left:not(.open)")
    page.wait_for_selector("#search", state="hidden")
    page.focus("#show-chats")
    for _ in range(3):  # to the skip link and past the start of the page
        page.keyboard.press("Shift+Tab")
        assert not page.evaluate("!!document.activeElement.closest('#left')")


def test_the_page_fits_phones_high_zoom_other_scripts_and_paper(browser: Any, address: str) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, color_scheme="dark"
    )
    chat = Chat(context, address)
    page = chat.page
    page.wait_for_selector("#left:not(.open)")
    page.evaluate("document.querySelector('#transcript').scrollTop = 9")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert page.evaluate("document.querySelector('#transcript').scrollTop") == 9
    assert page.is_hidden("#to-end")
    chat.set(max_tokens=30)
    chat.ask("مرحبا, hello.")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    style = "getComputedStyle(document.querySelector('.said p'))"  # follows the paragraph's script
    assert page.evaluate(f"[{style}.direction, {style}.unicodeBidi]") == ["rtl", "plaintext"]
    small = page.evaluate(
        """() => [...document.querySelectorAll("#main button, #main select")]
          .filter((one) => one.checkVisibility() && !one.matches(".cells"))
          .map((one) => [one.ariaLabel ?? one.textContent, one.getBoundingClientRect()])
          .filter(([, { width, height }]) => width < 44 || height < 44).map(([name]) => name)"""
    )
    assert small == []
    page.click("#show-chats")
    page.wait_for_selector("#left.open")
    page.click("#theme")
    assert not page.evaluate("document.body.classList.contains('dark')")
    for leave in ("#list a:has-text('hello')", "#close-chats", "#new"):
        page.click(leave)
        page.wait_for_selector("#left:not(.open)")
        page.click("#show-chats")
        page.wait_for_selector("#left.open")
    page.get_by_role("button", name="Actions for").first.click()
    chat.choose("Copy link")
    page.wait_for_selector("#notice:has-text('Copied the link')")
    place = "document.querySelector('#notice span').getBoundingClientRect()"
    top = f"document.elementFromPoint({place}.x + 9, {place}.y + 9).textContent"
    assert page.evaluate(top) == "Copied the link"  # the list does not cover it
    page.go_back()
    chat.reload()
    assert not page.evaluate("document.body.classList.contains('dark')")
    page.set_viewport_size({"width": 320, "height": 200})  # as at 400 %
    page.locator(f"{LAST} .sentence").scroll_into_view_if_needed()
    assert page.is_visible(f"{LAST} .sentence")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    page.emulate_media(media="print")
    assert page.is_hidden("#composer") and page.is_hidden("#left")
    assert page.is_visible(f"{DONE} .answer")
    assert chat.errors == []
    context.close()


def test_the_first_load_is_small_and_ten_tabs_work(browser: Any, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    n_bytes, urls = [], []
    session.on("Network.dataReceived", lambda event: n_bytes.append(event["encodedDataLength"]))
    session.on(
        "Network.requestWillBeSent",
        lambda event: urls.append(event["request"]["url"]),
    )
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_load_state("load")
    # 34 are Gradio's. Ours are modules that import each other, which joined files would not allow.
    assert len([url for url in urls if not url.startswith("data:")]) <= 51
    assert sum(n_bytes) < 300_000
    chats = [Chat(context, address) for _ in range(10)]
    chats[-1].set(max_tokens=8)
    chats[-1].ask("the tenth")
    chats[0].page.bring_to_front()
    chats[0].ask("the first")
    assert [chat.errors for chat in chats] == [[]] * 10
    context.close()
