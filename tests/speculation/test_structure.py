"""JSON schemas, regular expressions and grammars: what they allow, forbid and force."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from math import inf
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

from batching.errors import GrammarError
from batching.tree import TokenTree
from speculation import sandbox
from speculation.engine import Engine
from speculation.gbnf import gbnf_to_lark
from speculation.json_schema import followed
from speculation.meter import Meter, Stats
from speculation.sampling import SamplingParams, TokenLogprobs
from speculation.sandbox import problem_of
from speculation.structure import Structure, Structures
from tests.support.exact import PROMPT, same_texts


@pytest.fixture(scope="module")
def structures(engine: Engine) -> Structures:
    return Structures(engine.model)


def started(structures: Structures, **sampling: Any) -> Structure:
    found = structures.start(SamplingParams(**sampling))
    assert found is not None
    return found


def follows(engine: Engine, structure: Structure, text: str) -> bool:
    """Whether ``text`` is a whole text of the structure."""
    for token in engine.model.tokenize(text, add_special=False, parse_special=False):
        if not structure.allows(token):
            return False
        structure.accept(token)
    return not engine.model.ends.isdisjoint(structure.allowed().tolist())


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


ODD = ["C:\\temp\\new", "🦀", 'a "quoted"\tword', "\x1b[0m"]
SCHEMAS: list[tuple[Any, Sequence[Any], Sequence[Any]]] = [
    (_object(path={"enum": ODD}), [{"path": text} for text in ODD], [{"path": "C:\temp\new"}]),
    (_object(**{"a\tb\\n": {"const": [1, {"k": None}]}}), [{"a\tb\\n": [1, {"k": None}]}], [{}]),
    ({"type": "string", "maxLength": 501}, ["", "x" * 501], ["x" * 502]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1000},
     [[None] * 2, [None] * 40], [[None]]),
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 12, "multipleOf": 3}, [-3, 0, 9],
     [-6, 12, 10]),
    ({"type": "integer"}, [0, -12, 10**17], [10**19, -(10**19)]),
    ({"type": "number", "minimum": 0.5}, [0.5, 3, 99.25], [0.25, -1]),
    ({"type": "string", "pattern": "b+c"}, ["xbbcx", "bc"], ["cb"]),
    ({"type": "string", "pattern": "^\\p{Lu}\\d{2}$"}, ["Ä42"], ["ä42", "Ä4"]),
    (_object(any=True, never={"not": {"type": "object"}}), [{"any": {}, "never": 1}], [{"any": 1}]),
    ({"anyOf": [_object(a={"type": "boolean"}), _object(b={"type": "null"})]},
     [{"a": True}, {"b": None}], [{"a": None}, {}]),
    ({"allOf": [_object(a={"type": "boolean"}), _object(b={"type": "null"})]},
     [{"a": True, "b": None}], [{"a": True}]),
    ({"allOf": [_object(a={"type": "integer"}), _object(a={"minimum": 5})]},
     [{"a": 5}, {"a": 10**18}], [{"a": 4}, {"a": 10**19}]),
    ({"oneOf": [{"const": "x"}, {"type": "integer"}]}, ["x", 7], ["y"]),
    ({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"const": 1}},
      "required": ["n"]}, [{"n": 1}, {"next": {"next": {"n": 1}, "n": 1}, "n": 1}], [{"next": {}}]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [1, None]}}}, [1, None], [2]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "date-time"}, ["2026-11-27T20:00:00Z"], ["27.11.2026"]),
    (True, [1, "a", None, [{}]], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS, ids=lambda case: str(case)[:40])
def test_a_schema_allows_what_is_valid_and_nothing_else(
    engine: Engine, structures: Structures, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    for value in valid:
        text = json.dumps(value, ensure_ascii=False)
        assert follows(engine, started(structures, json_schema=schema), text), text
    for value in invalid:
        text = json.dumps(value, ensure_ascii=False)
        assert not follows(engine, started(structures, json_schema=schema), text), text


def test_objects_have_no_properties_beyond_those_of_their_schema_unless_it_says_so(
    engine: Engine, structures: Structures
) -> None:
    text = '{"a": 1, "b": 2}'
    closed = _object(a={"type": "integer"})
    for schema, expected in (
        (closed, False),
        ({**closed, "additionalProperties": True}, True),
        ({**closed, "patternProperties": {"^b$": {"type": "integer"}}}, True),
        ({"type": "object"}, True),
        ({"allOf": [closed, _object(b={"type": "integer"})]}, True),
        ({"$defs": {"x": closed}, "$ref": "#/$defs/x"}, False),
    ):
        assert follows(engine, started(structures, json_schema=schema), text) is expected, schema


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        (_object(a={"type": "string", "pattern": "^(?=x)a"}), ["/properties/a/pattern"]),
        ({"type": "string", "format": "color"}, ["/format"]),
        ({"items": {"type": "integer", "not": {"const": 3}}}, ["/items/not"]),
        ({"anyOf": [{"type": "array", "uniqueItems": True}]}, ["/anyOf/0/uniqueItems"]),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_named_or_refused_if_the_schema_is_strict(
    schema: dict[str, Any], left_out: list[str]
) -> None:
    assert followed(schema)[1] == left_out
    with pytest.raises(GrammarError, match="the JSON schema cannot be followed"):
        followed(schema, strict=True)


def test_a_schema_is_read_once_in_the_thread_that_asks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    start = Structures.start

    def recorded(structures: Structures, sampling: SamplingParams) -> Structure | None:
        threads.append(threading.current_thread())
        return start(structures, sampling)

    monkeypatch.setattr(Structures, "start", recorded)
    schema = {"type": "boolean"}
    engine.generate(PROMPT, sampling={"json_schema": schema}, max_tokens=9).run()
    assert threads == [threading.current_thread()]


def test_breakers_are_looked_for_once_in_the_thread_that_asks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    make = C.llama_sampler_init_dry

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return make(*arguments)

    monkeypatch.setattr(C, "llama_sampler_init_dry", recorded)
    again = PROMPT * 3
    plain = engine.generate(again, max_tokens=30).run().text
    texts = [
        engine.generate(
            again,
            max_tokens=30,
            sampling=SamplingParams(dry_multiplier=9.0, dry_breakers=breakers),
        )
        .run()
        .text
        for breakers in (("\x07",), ("\x07",), tuple(sorted({*plain})[:16]))
    ]
    assert threads == 2 * [threading.current_thread()]
    assert texts[0] == texts[1] != plain and texts[2] != texts[0]


def test_what_a_structure_forces_is_drafted_and_accepted(engine: Engine) -> None:
    schema = _object(kind={"const": "a rather long constant"}, ok={"type": "boolean"})
    for method in ("prompt-lookup", "suffix", "recycling:nodes=20", "draft:p_min=0.02", "auto"):
        plain, text = same_texts(engine, PROMPT, method, json_schema=schema, max_tokens=60)
        assert plain.stats.n_steps == plain.stats.n_tokens > 20
        assert text.stats.n_steps < plain.stats.n_steps / 2, method
        assert json.loads(text.text)["kind"] == "a rather long constant"


def test_accepted_drafts_count_for_their_source_or_for_the_structure() -> None:
    tree = TokenTree(5)
    tree.add_chain(0, [6, 7, 8])
    tree.sources[2] = "suffix"
    stats = Stats()
    Meter(stats, None).add_step(tree, (), [0, 1, 2, 3], [6, 7, 8, 9], 0, 1, [0.0] * 4)
    assert stats.accepted_by_source == {"structure": 2, "suffix": 1}


def test_drafts_that_cannot_follow_cost_no_row(engine: Engine, structures: Structures) -> None:
    tokens = [engine.model.tokenize(text, add_special=False) for text in ("the cat", "the dog")]
    tree = TokenTree(0)
    for chain in tokens:
        tree.add_chain(0, chain)
    expected = tree.follow(0, tokens[0])
    assert started(structures, regex="the cat saw").prune(tree) == expected
    assert len(expected) < len(tree) - 1
    repeated = 20 * "the cat saw the dog "
    settings: dict[str, Any] = {"method": "prompt-lookup", "max_tokens": 2}
    assert engine.generate(repeated, **settings).run().stats.n_drafted > 0
    assert (
        engine.generate(repeated, **settings, sampling={"regex": "[A-Z]"}).run().stats.n_drafted
        == 0
    )


@pytest.mark.parametrize(
    ("gbnf", "valid", "invalid"),
    [
        (
            'root ::= "a" | b "c"*\nb ::= "\\x62" | [0-9]{2,3}',
            ["a", "b", "bcc", "123c"],
            ["1", "ab"],
        ),
        ('root ::= item+ # comment\nitem ::= [^\\n]? "\\n"', ["\n", "x\ny\n"], ["xy\n"]),
        ('root ::= "(" root ")" | "x" root | "y"', ["y", "xxxy", "(x(y))"], ["(y", "xx"]),
        ('root ::= ws "é\\u0041" ws\nws ::= | " " ws', ["éA", "   éA  "], ["éa"]),
        ('root ::= . [a-cA-C-] ( | "!" )', ["\nb", "x-!", "éC"], ["bd"]),
        ('root ::= [a-z]+ "ing"', ["sing", "ingoting"], ["in", "ing"]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["ab"]),
    ],
)
def test_a_gbnf_grammar_allows_the_same_texts_in_lark(
    engine: Engine, structures: Structures, gbnf: str, valid: list[str], invalid: list[str]
) -> None:
    for text, expected in [*((one, True) for one in valid), *((one, False) for one in invalid)]:
        for grammar in (gbnf, gbnf_to_lark(gbnf)):
            assert follows(engine, started(structures, grammar=grammar), text) is expected, text


def _chain(rule: str, n: int, end: str) -> str:
    """Rules that lead to each other: ``rule`` has the names of one and of the next."""
    return "\n".join([*(rule.format(i, i + 1) for i in range(n)), end.format(n)])


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"json_schema": {"allOf": [{"pattern": f"[a-z]{{{i}}}.*{i}"} for i in range(40)]}},
         "took longer than 0.2 s"),
        ({"json_schema": {"properties": {"a": {"type": "string", "allOf": [
            {"pattern": f".*{i}[a-f]{{{i}}}"} for i in range(40)]}}, "uniqueItems": True}},
         "took longer than 0.2 s"),
        ({"grammar": _chain("r{} ::= r{}", 20_000, 'r{} ::= "a"\nroot ::= r0')},
         "ended the process"),
        ({"grammar": "%llguidance {}\nstart: r0\n" + _chain("r{}: r{}", 3000, 'r{}: "a"')},
         "ended the process"),
        ({"grammar": "%llguidance {}\nstart: T0\n" + _chain("T{}: T{}", 9000, 'T{}: "a"')},
         "ended the process"),
        ({"json_schema": {"$ref": "#/$defs/a0", "$defs": {
            **{f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)},
            "a5000": {"type": "null"}}}}, "ended the process"),
        ({"json_schema": '{"anyOf": [' * 3000 + "true" + "]}" * 3000}, "nested too deeply"),
        ({"regex": "(" * 3000 + "a" + ")" * 3000}, "invalid regex"),
        ({"regex": "a" * 5_000_000}, "has 5,000,095 characters of 4,194,304 at most"),
        ({"grammar": 'root ::= "\\U00110000"'}, "is no character"),
        ({"grammar": "root ::= [a-\\UFFFFFFFF]"}, "is no character"),
        ({"regex": "\\x{110000}"}, "not a Unicode scalar value"),
        ({"grammar": "root ::= <[99999999]>"}, "range end too large"),
    ],
    ids=lambda case: str(case)[:60],
)  # fmt: skip
def test_what_is_too_much_for_a_grammar_is_refused_and_the_next_one_is_read(
    engine: Engine,
    structures: Structures,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    reason: str,
) -> None:
    with monkeypatch.context() as patched, pytest.raises(GrammarError, match=reason):
        if "took longer" in reason:
            patched.setattr(sandbox, "GRAMMAR_SECONDS", 0.2)
        started(structures, **sampling)
    assert follows(engine, started(structures, regex=str(len(sampling))), "1")


def test_all_parts_of_a_request_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "GRAMMAR_SECONDS", 0.0)
    with pytest.raises(GrammarError, match="took longer than 0 s"):
        problem_of("%llguidance {}\nstart: /never tried/")


def test_long_repetitions_by_recursion_go_on(engine: Engine, structures: Structures) -> None:
    structure = started(structures, grammar='root ::= "a" root | "b"')
    (token,) = engine.model.tokenize("a", add_special=False)
    for _ in range(5000):
        structure.accept(token)
    assert structure.allows(token)


def test_text_ends_no_sooner_than_it_should(engine: Engine) -> None:
    end = engine.model.special_token("eot")
    assert end is not None
    late: dict[str, Any] = {"logit_bias": {end: 1000.0}, "min_tokens": 7}
    for more in ({}, {"regex": "[a-z ]*"}):
        text = engine.generate("a", sampling={**late, **more}).run()
        assert (len(text.token_ids), text.finish_reason) == (8, "stop")
    complete = engine.generate("a", sampling={"regex": "xy", "min_tokens": 50}).run()
    assert (complete.text, complete.finish_reason) == ("xy", "stop")


def test_probabilities_after_greedy_sampling_are_those_of_what_the_grammar_allows(
    engine: Engine,
) -> None:
    for sampling in ({}, {"repeat_penalty": 1.2}):
        text = engine.generate(
            "a",
            sampling={"regex": "(xy|zy)+", **sampling},
            max_tokens=4,
            logprobs=2,
            post_sampling=True,
        ).run()
        expected = [TokenLogprobs(0.0, ((token, 0.0),)) for token in text.token_ids]
        assert text.logprobs[:4] == expected and len(expected) == 4


def test_a_bias_that_forbids_all_that_a_grammar_allows_is_an_error_that_says_so(
    engine: Engine,
) -> None:
    token = engine.generate("a", sampling={"regex": "x"}).run().token_ids[0]
    for temperature in (0.0, 1.0):
        sampling = {"regex": "x", "logit_bias": {token: -inf}, "temperature": temperature}
        with pytest.raises(GrammarError, match="logit_bias forbids all tokens"):
            engine.generate("a", sampling=sampling).run()
