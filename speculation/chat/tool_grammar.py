"""Grammars that hold a reply to calls of its tools, or to a schema. Pure.

They are written in llguidance's form of Lark, https://github.com/guidance-ai/llguidance. Rules have
small letters; a lexeme (``TEXT``) is a regular expression. A lexeme of a ``[lazy]`` rule ends as
soon as it matches, before a longer one could: that is how free text goes over into a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from batching.errors import GrammarError, InvalidParameter
from speculation.chat.reasoning import Thinking
from speculation.chat.reply_parser import pattern_of
from speculation.chat.tool_format import ID, INDEX, Parameters, ToolFormat, atoms
from speculation.chat.tools import (
    STRING,
    Tool,
    ToolChoice,
    checked_tools,
    chosen,
    listed,
    referred,
    strict_names,
    types_of,
)
from speculation.json_schema import followed, tell
from speculation.sandbox import one_limit, problem_of

MOST_ARGUMENTS = 500  # of a tool, or properties of an object, with something between two
_TEXT = r"/(.|\n)*/"
_GAP = r"/[ \n]{0,2}/"  # with more, a model may write spaces without end
_SCALARS = ("number", "integer", "boolean", "null")  # written as in JSON in every form
_REGEX_OF = {ID: "/[a-zA-Z0-9]{9}/", INDEX: "/[0-9]+/"}


@one_limit()
def reply_grammar(
    special: Callable[[str], int | None],
    format_: ToolFormat | None = None,
    tools: Sequence[Tool] = (),
    choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    answer: str | Mapping[str, Any] | bool | None = None,
    strict: bool = False,
    thinking: Thinking | None = None,
    begun: bool = False,
    budget: int | None = None,
    ends: Collection[int] = (),
    others: Collection[int] = (),
) -> str | None:
    """A grammar for calls of ``tools``, for an ``answer`` by a JSON schema, or for either; None if
    nothing is asked for, or forbidden.

    special   the token that has exactly this text, if it is a control token; else None
    choice    OpenAI's tool_choice. With ``auto``, text is free, and a call's first mark begins what
              is held; free text may follow. With a schema, calls or an answer come first.
              With ``none``, text has no such mark
    parallel  whether a reply may have several calls
    strict    whether the schema of the answer must be kept in full
    thinking  the marks of the reasoning that may come first; ``begun`` if the prompt ends with the
              opening one
    budget    the most tokens of reasoning: then its closing mark is forced. If the mark is no token
              that ``special`` knows, it is forced after four characters for each token
    ends      tokens that end a reply
    others    all control tokens: free text may have those that are no marks here

    Raises InvalidParameter, with the tool's name, for an invalid tool, schema or choice.
    """
    functions, required, parallel = chosen(tools, choice, parallel)
    forbidden = ""
    if format_ is not None and not functions and checked_tools(tools):
        forbidden = format_.mark or format_.tag
    is_free = answer is None and (budget is None or thinking is None)
    if is_free and not functions and not forbidden:
        return None
    grammar = _Grammar(special, ends, forbidden)
    first = grammar.thinking(thinking, begun, budget) if thinking is not None else ""
    before = grammar.text(thinking.answer) if thinking is not None else ""
    reply = "" if functions else f"{before} free"
    if answer is not None:
        reply = f"{before} {grammar.json(answer, _Whole({}, 'the schema of the answer', strict))}"
    if not functions:
        return grammar.written(f"{first} {reply}", others)
    assert format_ is not None
    calls = _Calls(grammar, format_, tools, functions, parallel)
    if required:
        reply = calls.only()
    elif reply:
        reply = f"({calls.only(beside=True)} | {reply})"
    elif before:
        reply = f"({calls.only()} | {before} free)"
    else:
        reply = calls.in_text()
    return grammar.written(f"{first} {reply}", others)


class _Whole(NamedTuple):
    """The schema that others are parts of, what errors call it, and whether it must be kept in
    full."""

    schema: Mapping[str, Any]
    where: str
    strict: bool


class _Grammar:
    """Rules, and what they need of the vocabulary. No text has the ``forbidden`` mark."""

    def __init__(
        self, special: Callable[[str], int | None], ends: Collection[int], forbidden: str
    ) -> None:
        self._special, self._ends = special, ends
        token = special(forbidden)
        self._marks = set() if token is None else {token}
        self._text = _TEXT
        if forbidden and token is None:
            self._text += " & ~" + _regex(rf"(.|\n)*{re.escape(forbidden)}(.|\n)*")
        self._rules: dict[str, str] = {}

    def written(self, start: str, others: Collection[int]) -> str:
        """The grammar, with the rule ``free`` for text without the marks that the rules use."""
        more = _ranges(set(others) - self._marks - set(self._ends))
        free = f"TEXT (<[{more}]> TEXT)*" if more else "TEXT"
        lines = ["%llguidance {}", f"start: {start}", f"TEXT: {self._text}", f"free: {free}"]
        return "\n".join([*lines, *self._rules.values()]) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self._rules)}"
        self.define(name, body, options)
        return name

    def define(self, name: str, body: str, options: str = "") -> None:
        self._rules[name] = f"{name}{options}: {body}"

    def has(self, name: str) -> bool:
        return name in self._rules

    def text(self, text: str) -> str:
        """A text as it is, up to a token that ends the reply."""
        items, plain = [], ""
        for atom in [*atoms(text), ""]:
            token = self._special(atom) if atom else None
            if atom and token is None and atom not in _REGEX_OF:
                plain += atom
                continue
            if plain:
                items.append(json.dumps(plain))
                plain = ""
            if token is not None and token in self._ends:
                break
            if token is not None:
                self._marks.add(token)
                items.append(f"<[{token}]>")
            elif atom:
                items.append(_REGEX_OF[atom])
        return " ".join(items)

    def until(self, mark: str) -> str:
        """Free text up to and with the first ``mark``."""
        first, *rest = atoms(mark)
        if self._special(first) is not None:
            return f"free {self.text(mark)}"
        if any(self._special(atom) is not None for atom in rest):
            return f"{self.until(first)} {self.text(''.join(rest))}"
        return self.rule(f"TEXT {json.dumps(mark)}", "[lazy]")

    def string(self, schema: Any, whole: _Whole, mark: str) -> str:
        """A string as it is, by its JSON schema, up to and with the first ``mark``."""
        values = _values(schema, whole.schema)
        if values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(json.dumps(value) for value in values)}) {self.text(mark)}"
        lexeme = _lexeme(schema, whole)
        bare = mark.lstrip()
        if not lexeme:
            return self.until(bare)
        name = f"S{len(self._rules)}"
        self.define(name, lexeme)
        line = r" /\n?/" if len(bare) < len(mark) else ""
        if any(self._special(atom) is not None for atom in atoms(bare)):
            return f"{name}{line} {self.text(bare)}"
        return self.rule(f"{name}{line} {json.dumps(bare)}", "[lazy]")

    def thinking(self, marks: Thinking, begun: bool, budget: int | None) -> str:
        """Reasoning with its marks; optional unless it has begun."""
        if begun:
            return f"{self._thought(marks, budget)} {_GAP}"
        known = (self._special(atom) for atom in atoms(marks.opening + marks.close))
        if any(token is not None for token in known):
            return f"({self.text(marks.opening)} {self._thought(marks, budget)} {_GAP})?"
        # In one lexeme, for free text could begin as it does.
        return f"({self._spelled(marks.opening, marks, budget)} {_GAP})?"

    def _thought(self, marks: Thinking, budget: int | None) -> str:
        """Reasoning after its opening mark, up to and with its closing one."""
        if budget is None:
            return self.until(marks.close)
        if self._special(atoms(marks.close)[0]) is not None:
            text = self.rule("TEXT", f"[max_tokens={budget}]") if budget > 0 else ""
            return f"{text} {self.text(marks.close)}"
        return self._spelled("", marks, budget)

    def _spelled(self, opening: str, marks: Thinking, budget: int | None) -> str:
        """Reasoning up to a closing mark that is no token."""
        most = "*" if budget is None else f"{{0,{4 * budget}}}"
        pattern = rf"{re.escape(opening)}(.|\n){most}{re.escape(marks.close)}"
        return self.rule(_regex(pattern), "[lazy]")

    def json(self, schema: str | Mapping[str, Any] | bool, whole: _Whole) -> str:
        """A value by its JSON schema."""
        try:
            schema, left_out = followed(schema, strict=whole.strict)
        except GrammarError as error:
            raise InvalidParameter(f"{whole.where}: {error}") from error
        tell(whole.where, *left_out)
        return self.rule(f"%json {json.dumps(schema)}")


class _Calls:
    """The calls of tools that a reply may have."""

    def __init__(
        self,
        grammar: _Grammar,
        format_: ToolFormat,
        tools: Sequence[Tool],
        functions: Sequence[Mapping[str, Any]],
        parallel: bool,
    ) -> None:
        self._grammar, self._format = grammar, format_
        self._parallel = parallel and format_.between is not None
        strict = strict_names(tools)
        self._schemas = {
            f["name"]: _Whole(
                {"type": "object", **f["parameters"]},
                f"the parameters of tool {f['name']}",
                f["name"] in strict,
            )
            for f in functions
        }
        text = grammar.text
        self._close = text(format_.close)
        self._arguments = {name: self._arguments_of(whole) for name, whole in self._schemas.items()}
        options = " | ".join(
            f"{text(name + format_.middle)} {arguments}"
            for name, arguments in self._arguments.items()
        )
        self._call = grammar.rule(f"({options}) {self._close}")

    def only(self, beside: bool = False) -> str:
        """The calls alone; ``beside`` an answer that may be JSON, too."""
        text, format_ = self._grammar.text, self._format
        if not format_.mark and beside:
            objects = self._objects()
            if objects:
                return f"({' | '.join(objects)})"
        tag = self._tag()
        return f"{tag} {self._section(text(format_.begin + format_.opening))}"

    def in_text(self) -> str:
        """Free text with calls."""
        format_ = self._format
        if not format_.mark:
            opening = pattern_of(format_.begin + format_.opening)
            middle = pattern_of(format_.middle).removesuffix(r"\s*")
            heads = []
            for name, arguments in self._arguments.items():
                pattern = rf"\s*{opening}{re.escape(name)}{middle}"
                head = self._grammar.rule(_regex(pattern), "[lazy]")
                heads.append(f"{head} {_GAP} {arguments} {self._close}")
            return f"({self._tag()} ({' | '.join(heads)}) | free)"
        first, *rest = atoms(format_.begin + format_.opening)
        section = f"{self._grammar.until(first)} {self._section(self._grammar.text(''.join(rest)))}"
        return f"({section})* free" if self._parallel else f"({section} | free)"

    def _section(self, opening: str) -> str:
        """Calls, with what is around them; ``opening`` is what is before the first name."""
        text, format_ = self._grammar.text, self._format
        more = ""
        if self._parallel:
            again = f"{text((format_.between or '') + format_.opening)} {self._call}"
            more = f"({again})*"
        return f"{opening} {self._call} {more} {text(format_.end)}"

    def _tag(self) -> str:
        tag = self._format.tag
        return f"({self._grammar.text(tag)})?" if tag else ""

    def _objects(self) -> list[str]:
        """The calls as JSON objects, if they are some."""
        first = re.fullmatch(r'\s*\{\s*"(\w+)":\s*"', self._format.opening)
        second = re.fullmatch(r'",\s*"(\w+)":\s*', self._format.middle)
        if first is None or second is None or self._format.begin:
            return []
        key, inner = first[1], second[1]
        found = []
        for name, whole in self._schemas.items():
            arguments = _moved(whole.schema, f"#/properties/{inner}")
            schema = {
                "type": "object",
                "properties": {key: {"const": name}, inner: arguments},
                "required": [key, inner],
                "additionalProperties": False,
            }
            found.append(self._grammar.json(schema, whole))
        return found

    def _arguments_of(self, whole: _Whole) -> str:
        """A rule for a function's arguments."""
        grammar, schema, written = self._grammar, whole.schema, self._format.parameters
        if self._format.quote:
            return _Notation(grammar, self._format.quote, whole).rule_for(schema)
        if written is None:
            return grammar.json(schema, whole)
        properties = _properties(schema)
        if not properties:
            key = "/[a-zA-Z0-9_.-]+/"
            value = f"{grammar.text(written.string)} {grammar.until(written.after.lstrip())}"
            any_ = grammar.rule(f"{grammar.text(written.before)} {key} {value}")
            return grammar.rule(f"{any_}*") if _is_open(schema) else ""
        required = listed(schema.get("required"))
        parts = []
        for key, value in properties.items():
            where = f"argument {key} in {whole.where}"
            body = self._parameter(written, key, value, whole._replace(where=where))
            parts.append((grammar.rule(body), key in required))
        return _sequence(parts, grammar.text(written.between))

    def _parameter(self, written: Parameters, key: str, schema: Any, whole: _Whole) -> str:
        """An argument that is written by itself."""
        grammar, text = self._grammar, self._grammar.text
        types = types_of(schema, whole.schema)
        head = text(written.before + key)
        if "string" not in types or (types != STRING and written.string != written.value):
            inner = _with_definitions(schema, whole.schema)
            return (
                f"{head} {text(written.value)} {grammar.json(inner, whole)} {text(written.after)}"
            )
        head = f"{head} {text(written.string)}"
        if types != STRING:
            return f"{head} {grammar.until(written.after.lstrip())}"
        return f"{head} {grammar.string(schema, whole, written.after)}"


class _Notation:
    """Rules for objects with bare keys, whose strings have marks around them."""

    def __init__(self, grammar: _Grammar, quote: str, whole: _Whole) -> None:
        self._grammar, self._quote, self._whole = grammar, quote, whole
        self._known: dict[str, str] = {}  # rules by the references that lead to them

    def rule_for(self, schema: Any) -> str:
        """A rule for the values that a schema allows."""
        if not isinstance(schema, Mapping):
            return self._anything()
        root, reference = self._whole.schema, schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._known:
                self._known[reference] = self._anything()  # if it refers to itself
                self._known[reference] = self.rule_for(referred(root, reference))
            return self._known[reference]
        options = [self._written(value) for value in _values(schema, root)]
        if not options:
            parts = schema.get("anyOf") or schema.get("oneOf") or ()
            options = [self.rule_for(each) for each in parts]
        if not options:
            types = types_of(schema, root)
            options = [
                self._kind(kind, schema) for kind in ("string", "array", "object") if kind in types
            ]
            scalars = [kind for kind in _SCALARS if kind in types]
            if scalars:
                options.append(self._grammar.json({**schema, "type": scalars}, self._whole))
        return self._grammar.rule(" | ".join(options)) if options else self._anything()

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            string = self._grammar.string(schema, self._whole, self._quote)
            return f"({self._grammar.text(self._quote)} {string})"
        if kind == "array":
            item = self.rule_for(schema["items"]) if "items" in schema else self._anything()
            return f'("[" ({item} ("," {item})*)? "]")'
        properties = _properties(schema)
        if not properties:
            pair = f'/[a-zA-Z0-9_.-]+/ ":" {self._anything()}'
            pairs = f'({pair} ("," {pair})*)?' if _is_open(schema) else ""
            return f'("{{" {pairs} "}}")'
        required = listed(schema.get("required"))
        parts = [
            (f"{json.dumps(key + ':')} {self.rule_for(properties[key])}", key in required)
            for key in sorted(properties)
        ]
        return f'("{{" {_sequence(parts, _COMMA)} "}}")'

    def _anything(self) -> str:
        if not self._grammar.has("anything"):
            self._grammar.define("anything", "")  # lists and objects have it inside
            kinds = [self._kind(kind, {}) for kind in ("string", "object", "array")]
            kinds.append(self._grammar.json({"type": list(_SCALARS)}, self._whole))
            self._grammar.define("anything", " | ".join(kinds))
        return "anything"

    def _written(self, value: Any) -> str:
        """The rule's text for one value."""
        if isinstance(value, str):
            return self._grammar.text(f"{self._quote}{value}{self._quote}")
        return json.dumps(json.dumps(value))


_COMMA = '","'


def _sequence(parts: Sequence[tuple[str, bool]], between: str) -> str:
    """Parts in a row, each a rule and whether it must be there, with ``between`` between two."""
    if not between:
        return " ".join(body if needed else f"({body})?" for body, needed in parts)
    if len(parts) > MOST_ARGUMENTS:  # each is followed by all that come after it
        raise InvalidParameter(
            f"a tool has {len(parts):,} arguments of {MOST_ARGUMENTS} at most; give fewer"
        )
    options = []
    for i, (body, needed) in enumerate(parts):
        more = [f"({between} {b})" + ("" if n else "?") for b, n in parts[i + 1 :]]
        options.append(" ".join([body, *more]))
        if needed:
            return f"({' | '.join(options)})"
    return f"({' | '.join(options)})?"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object without properties may have some."""
    return bool(schema.get("additionalProperties", "properties" not in schema))


def _fields(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of a schema, or of that which it refers to."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = referred(root, schema["$ref"])
    return schema if isinstance(schema, Mapping) else {}


def _values(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists."""
    fields = _fields(schema, root)
    return [fields["const"]] if "const" in fields else listed(fields.get("enum"))


def _lexeme(schema: Any, whole: _Whole) -> str:
    """Regular expressions that a string has to match by its pattern and its length; empty if it may
    be any. Raises InvalidParameter for a pattern that cannot be followed, if it must be."""
    fields = _fields(schema, whole.schema)
    found = []
    least, most = fields.get("minLength", 0), fields.get("maxLength", "")
    if ("minLength" in fields or "maxLength" in fields) and f"{least}{most}".isdecimal():
        found.append(f"/(.|\\n){{{least},{most}}}/")
    if isinstance(fields.get("pattern"), str):
        text: str = fields["pattern"]
        start = "" if text.startswith("^") else r"(.|\n)*"
        is_whole = text.endswith("$") and not text.endswith("\\$")  # up to the string's end
        inner, end = (text[:-1], "") if is_whole else (text, r"(.|\n)*")
        pattern = _regex(f"{start}({inner.removeprefix('^')}){end}")
        grammar = LLMatcher.grammar_from_lark(f"%llguidance {{}}\nstart: {pattern}")
        if not problem_of(grammar):
            found.append(pattern)
        elif whole.strict:
            raise InvalidParameter(f"{whole.where}: {fields['pattern']!r:.80} cannot be followed")
    return " & ".join(found)


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part's schema with what it may refer to in the whole one."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **schema} if isinstance(schema, Mapping) else schema


def _moved(schema: Any, where: str) -> Any:
    """A schema that has become a part of another one, with its references mended."""
    if isinstance(schema, list):
        return [_moved(each, where) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, where) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"{where}{reference[1:]}"
    return moved


def _regex(pattern: str) -> str:
    """A regular expression as Lark has it."""
    return f"/{pattern.replace(chr(92) + '/', '/').replace('/', chr(92) + '/')}/"


def _ranges(tokens: Collection[int]) -> str:
    """Token ids as llguidance has them: ``1,5-9``."""
    found: list[list[int]] = []
    for token in sorted(tokens):
        if found and found[-1][-1] == token - 1:
            found[-1][1:] = [token]
        else:
            found.append([token])
    return ",".join("-".join(map(str, each)) for each in found)
