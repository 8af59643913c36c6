"""Markdown with drafted tokens: colours are where they belong and change nothing else."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from app.page import markdown
from app.page.highlight import highlighted
from app.page.markdown import Growing, Marks, render_blocks

OPEN = re.compile(r'<span class="drafted" data-n="\d+">')
TAG = re.compile(r"</?[a-z][^>]*>")
SNIPPETS = (
    *("**", "*", "_", "~~", "`", "``", "[", "](http://x.org)", '](x "t")', "<http://e.org>", "\n"),
    *"\n\n;\n- ;\n  - ;\n1. ;\n> ;\n> > ;\n# ;\n## ; #\n;\n---\n;\n===\n;\n```python\n".split(";"),
    *"\n```\n;\n    ;\n\t;  \n;\\\n;\\*;\\".split(";"),
    *("&amp;", "\n| ", " | ", "\\|", "|\n", "\n|---|---|\n", "$", "$$", "\n$$\n", "\\(", "\\)"),
    *("\n\\[\n", "\\]", " ", " ", " ", "!", "<b>", "&", "def ", "# ", "'", "~", "~~~", "  "),
    *("\r\n", "&#65;", "[a]", "\n[a]: "),
)


def render(text: str, marks: Marks | None = None) -> str:
    return "".join(render_blocks(text, marks))


def marks_of(pieces: Iterable[tuple[str, bool]]) -> Marks:
    marks = Marks()
    for text, is_drafted in pieces:
        marks.add(len(text), is_drafted)
    return marks


def growing_html(text: str) -> str:
    growing = Growing()
    growing.update(text, marks_of([(text, False)]))
    return "".join(growing.blocks)


def random_text(chance: random.Random, n: int) -> str:
    """Random Markdown in which each letter, an ideograph, occurs once."""
    letters = iter(chance.sample(range(0x4E00, 0x9F00), 2 * n))
    parts = []
    for _ in range(n):
        parts.append(chance.choice(SNIPPETS))
        if chance.random() < 0.6:
            parts.append("".join(chr(next(letters)) for _ in range(chance.randint(1, 2))))
    return "".join(parts)


def random_pieces(chance: random.Random, text: str) -> list[tuple[str, bool]]:
    pieces, at = [], 0
    while at < len(text):
        end = at + chance.randint(1, 5)
        pieces.append((text[at:end], chance.random() < 0.5))
        at = end
    return pieces


def in_and_out(html: str) -> tuple[str, str, str]:
    """The HTML without drafted spans; the characters inside such spans; those outside."""
    html = re.sub(r"<math.*?</math>", "", html, flags=re.DOTALL) if "<math" in html else html
    plain, inside, outside, depth = [list[str]() for _ in range(4)]
    at = 0
    for tag in TAG.finditer(html):
        (inside if "drafted" in depth else outside).append(html[at : tag.start()])
        plain.append(html[at : tag.start()])
        at = tag.end()
        if tag[0].startswith("<span"):
            depth.append("drafted" if OPEN.fullmatch(tag[0]) else "")
        if tag[0] == "</span>" and depth.pop() == "drafted":
            continue
        if not OPEN.fullmatch(tag[0]):
            plain.append(tag[0])
    return "".join([*plain, html[at:]]), "".join(inside), "".join([*outside, html[at:]])


def test_colours_mark_exactly_the_drafted_characters_and_change_nothing_else() -> None:
    chance = random.Random(1)
    n_coloured = 0
    for _ in range(400):
        text = random_text(chance, chance.randint(3, 30))
        pieces = random_pieces(chance, text)
        drafted = {char for part, is_drafted in pieces for char in part if is_drafted}
        plain, inside, outside = in_and_out(render(text, marks_of(pieces)))
        assert plain == in_and_out(render(text))[0], text
        n_coloured += len(inside)
        for char in inside:
            assert char < "一" or char in drafted, (text, char)
        for char in outside:
            assert char < "一" or char not in drafted, (text, char)
    assert n_coloured > 3000


def test_a_growing_text_ends_up_like_the_whole_text() -> None:
    chance = random.Random(2)
    for _ in range(150):
        text = random_text(chance, chance.randint(3, 40))
        pieces, growing, shown = random_pieces(chance, text), Growing(), 0
        end = "\n\n一\n"  # what is whole is shown as it is
        page: list[str] = []  # which replaces only the blocks that changed
        pieces.append((end, False))
        while shown < len(pieces):
            shown = min(len(pieces), shown + chance.randint(1, 6))
            part = "".join(text for text, _ in pieces[:shown])
            first = growing.update(part, marks_of(pieces[:shown]))
            if first is not None:
                page[first:] = growing.blocks[first:]
            assert page == growing.blocks
        assert "".join(page) == render(text + end, marks_of(pieces)), text


def test_an_unfinished_line_does_not_settle_the_block_before_it() -> None:
    growing, text = Growing(), "a\n```x``` b\n"  # until its third last tick a block of code
    for n in range(len(text) + 1):
        growing.update(text[:n], marks_of([(text[:n], False)]))
    assert "".join(growing.blocks) == "<p>a<br />\n<code>x</code> b</p>\n"


def test_a_text_that_has_ended_is_shown_as_it_is() -> None:
    growing, marks = Growing(), marks_of([("a\n\n**b", False)])
    assert growing.update("a\n\n**b", marks) == 0
    assert growing.blocks == ["<p>a</p>\n", "<p><strong>b</strong></p>\n"]
    assert growing.finish("a\n\n**b", marks) == 1
    assert growing.blocks == ["<p>a</p>\n", "<p>**b</p>\n"]
    assert growing.finish("a\n\n**b", marks) is None


def test_only_blocks_that_changed_are_shown_again() -> None:
    growing, marks, changed, text = Growing(), Marks(), [], ""
    end = "\n\n[x]", "\n\n[x]: http://x.org\n"
    for more in ("one", "\n\ntwo ", "more", "\n\n- a\n", "- b\n", *end):
        text += more
        marks.add(len(more), is_drafted=False)
        changed.append(growing.update(text, marks))
    assert changed == [0, 1, 1, 2, 2, 3, 3]
    assert growing.update(text, marks) is None
    assert "http://x.org" in growing.blocks[3]


CODE = {
    "python": 'def f(a):\n    """Of\n    lines."""\n    return [a, "x"]  # so\n\n\n',
    "js": "function f(a) {\n  /* so */\n  return `${a} x`;\n}\n",
    "cpp": "int f(int a) {\n  // so\n  return 2 * a;\n}\n",
    "no-such-language": "a < b\n",
    "": "a < b\n",
}


@pytest.mark.parametrize("language", CODE)
def test_a_growing_block_of_code_is_shown_as_at_its_end_and_costs_what_is_new(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read = 0

    def counted(code: str, *given: Any) -> list[tuple[str, str]]:
        nonlocal n_read
        n_read += len(code)
        return highlighted(code, *given)

    monkeypatch.setattr(markdown, "highlighted", counted)
    code = CODE[language] * (16_000 // len(CODE[language]))
    text = f"So:\n\n```{language}\n{code}```\n\nDone 🦊."
    growing, marks, shown, n_sent = Growing(), Marks(), "", 0
    for end in range(200, len(text) + 200, 200):
        marks.add(len(text[end - 200 : end]), is_drafted=end % 1400 == 0)
        first = growing.update(text[:end], marks)
        new = "".join(growing.blocks[first:])[len(growing.same) :]
        before, shown = shown, "".join(growing.blocks)
        assert shown.removesuffix(new) == before[: len(shown) - len(new)]
        n_sent += len(new)
    assert n_read < 15 * len(text)
    whole = render_blocks(text, marks)
    again = re.compile('</span><span class="drafted" data-n="[0-9]+">')  # one in two parts
    assert [again.sub("", one) for one in growing.blocks] == [again.sub("", one) for one in whole]
    assert n_sent < 3 * len("".join(whole))


def coloured(text: str) -> str:
    """Render a text drafted between « and », with its spans shown in the same way."""
    parts = re.split("[«»]", text)
    html = render("".join(parts), marks_of([(part, i % 2 == 1) for i, part in enumerate(parts)]))
    return OPEN.sub("«", html).replace("</span>", "»")


def test_drafted_text_is_marked_in_every_kind_of_markdown() -> None:
    for text, expected in {
        "#  «a» #": "<h1>«a»</h1>\n",
        "*a«b*c»": "<p><em>a«b»</em>«c»</p>\n",
        "[a«b](http://x.org)»": '<a href="http://x.org" target="_blank" '
        'rel="noopener noreferrer">a«b»</a>',
        "`` a«`» ``": "<code>a«`»</code>",
        "&a«mp;»\\«*»": "<p>«&amp;»«*»</p>\n",
        "> - a\n«b»": "<br />\n«b»</li>",
        "| a | b |\n|-|-|\n| «c» | d\\«|e» |": "<td>«c»</td>\n<td>d«|e»</td>",
        "```\na«b\nc»\n```": "<pre><code>a«b\nc»\n</code></pre>",
        "    «a»b": "<pre><code>«a»b\n</code></pre>",
        "$«x»$ and $y$": "<p><math><mi>x</mi></math> and",
        "«$x$» and": "<p>«<math><mi>x</mi></math>» and",
        "$\\fo«o$»": "<p>$\\fo«o$»</p>\n",
    }.items():
        assert expected in coloured(text), text


def test_code_is_highlighted_and_its_drafts_are_marked() -> None:
    code = coloured("```python\n«re»turn 1\n```").split("</div>", 1)[1]
    line = '<pre><code><span class="keyword">«re»turn» <span class="number">1»\n'
    assert code.startswith(line)
    assert "<pre><code>a &lt; b\n</code></pre>" in render("```no-such-language\na < b\n```")


def test_blocks_of_code_name_their_language_and_tasks_get_a_box() -> None:
    head = '<div class="code" data-name="code.{}"><div class="actions"><span>{}</span><button'
    assert render("```c++ x\n```").startswith(head.format("cpp", "c++"))
    assert render("```\n```").startswith(head.format("txt", ""))
    shown = ["preview" in render(f"```{name}\n```") for name in ("html", "SVG", "python")]
    assert shown == [True, True, False]
    done = '<span class="task" role="img" aria-label="done">☑» '  # any span's end
    assert coloured("- [x] «a»b\n- a [ ]") == f"<ul>\n<li>{done}«a»b</li>\n<li>a [ ]</li>\n</ul>\n"
    assert 'aria-label="to do">☐</span> a' in render("1. [ ] a")
    assert render("[ ] a") == "<p>[ ] a</p>\n"


def test_a_message_shows_code_and_tables_and_the_rest_as_it_was_written() -> None:
    text, table, code = "# a *b*\n  - <i> `c`", "|x|\n|-|\n|*1*|", "```js\nlet\n```"
    first, second, third = markdown.render_message("\n\n".join((text, table, code)))
    assert first == "<p># a *b*\n  - &lt;i&gt; <code>c</code></p>\n"
    assert "<td>*1*</td>" in second
    assert '<span class="keyword">let</span>' in third


def test_formulas_become_mathml_and_prices_do_not() -> None:
    block = '<p class="formula"><math display="block"><mfrac><mn>1</mn><mn>2</mn></mfrac></math>'
    for text in ("$$\\frac12$$", "a\n$$\n\\frac12\n$$\nb", "\\[ \\frac12 \\]"):
        assert block in render(text), text
    assert "<math><mi>x</mi></math>" in render("so \\(x\\) is")
    for text in ("$5 and $6", "US$5/$6", "$HOME:$PATH", "a $ b $"):
        assert render(text) == f"<p>{text}</p>\n"
    assert "<img" not in render("$\\text{<img src=x onerror=alert(1)>}$")
    assert "<a" not in render("$\\href{javascript:alert(1)}{x}$")


def test_unfinished_markdown_is_shown_completed() -> None:
    for text, expected in {
        "a **b": "<p>a <strong>b</strong></p>\n",
        "a **b *c": "<p>a <strong>b <em>c</em></strong></p>\n",
        "a **b*": "<p>a <strong>b</strong></p>\n",
        "a `b *c": "<p>a <code>b *c</code></p>\n",
        "a\n-": "<p>a</p>\n",
        "```\na\n``": "<pre><code>a\n</code></pre>",
        "[a](http://x.or": '<a href="http://x.or"',
        "| a | b |\n|-": "<th>a</th>\n<th>b</th>",
        "$$\nx": '<p class="formula">$$\nx</p>\n',
    }.items():
        assert expected in growing_html(text), text
