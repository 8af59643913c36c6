"""Prompts of the benchmark: files, the built-in ones, and selecting from them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from speculation.bench.prompt_file import (
    Prompt,
    PromptFileError,
    parse_prompts,
    read_prompts,
    select_prompts,
)


def test_a_line_is_a_prompt_or_a_conversation() -> None:
    text = (
        '{"prompt": "Hi", "category": "a", "question_id": "one"}\n'
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "more": 1}\n'
        '\n{"prompt": "Hi"}\r\n'
    )
    prompts = parse_prompts(text, "p.jsonl")
    assert prompts == [
        Prompt("one", "a", ("Hi",)),
        Prompt("81", "writing", ("Write.", "Shorter.")),
        Prompt("line-4", "prompts", ("Hi",)),
    ]
    assert [prompts[1].turn_id(1), prompts[1].turn_id(2)] == ["81", "81#2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{prompt: 1}", "JSON is malformed"),
        ("[" * 5000, "got `array`; write one object per line"),
        ('{"prompt": "Hi", "more": ' + "[" * 5000, "recursion"),
        ('{"text": "Hi"}', 'neither "prompt" nor "turns"'),
        ('{"turns": []}', "Expected `array` of length >= 1 - at `$.turns`"),
        ('{"turns": "Hi"}', "got `str` - at `$.turns`"),
        ('{"turns": ["Hi", 3]}', "got `int` - at `$.turns[1]`"),
        ('{"prompt": ""}', "Expected `str` of length >= 1 - at `$.prompt`"),
        ('{"prompt": "\\ud800xaaaaaaaa"}', "surrogate"),
        ('{"prompt": "Hi", "category": 3}', "got `int` - at `$.category`"),
        ('{"prompt": "Hi", "category": "all"}', 'category name "all" is reserved; choose another'),
        ('{"prompt": "Hi", "question_id": true}', "got `bool` - at `$.question_id`"),
        ('{"prompt": "Hi", "question_id": "x"}', "line 1 has the question_id 'x' too"),
        ('{"prompt": "Hi", "question_id": "x#2"}', "line 1 has the question_id 'x#2' too"),
    ],
)
def test_an_invalid_line_is_reported_with_its_file(line: str, reason: str) -> None:
    text = f'{{"turns": ["Hi", "Ho"], "question_id": "x"}}\n{line}\n'
    with pytest.raises(PromptFileError) as caught:
        parse_prompts(text, "folder/p.jsonl")
    assert str(caught.value).startswith("folder/p.jsonl, line 2: ")
    assert reason in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"cannot read the prompts .*none\.jsonl"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(PromptFileError, match=r"p\.jsonl has no prompts"):
        parse_prompts("\n", "p.jsonl")


def test_there_are_ten_builtin_prompts_and_four_novel_ones_in_each_of_eight_categories() -> None:
    for name, n, categories in (
        (
            "builtin",
            10,
            "summarise context-qa edit-code chat extraction writing rewriting arithmetic",
        ),
        ("novel", 4, "dialogue definition poem numbers languages random short-answer long-answer"),
    ):
        counts = Counter(prompt.category for prompt in read_prompts(name))
        assert counts == dict.fromkeys(categories.split(), n)


def test_the_limit_applies_to_each_category() -> None:
    prompts = [Prompt(name, name[0], ("x", "y")) for name in ("a1", "b1", "a2", "b2", "a3", "c1")]
    assert [p.id for p in select_prompts(prompts, None, 2)] == ["a1", "b1", "a2", "b2", "c1"]
    assert [p.id for p in select_prompts(prompts, ["a", "c"], 1)] == ["a1", "c1"]
    assert [p.id for p in select_prompts(prompts, ["b"], None)] == ["b1", "b2"]


def test_an_unknown_category_is_reported_with_the_known_ones() -> None:
    prompts = [Prompt("1", "chat", ("x",)), Prompt("2", "writing", ("x",))]
    with pytest.raises(InvalidParameter, match="'chta'; categories: chat, writing"):
        select_prompts(prompts, ["chta"], None)
