"""GBNF: llama.cpp's form of grammars, translated to Lark as llguidance reads it. Pure.

GBNF describes a text character by character. In Lark, a terminal is a regular expression, which is
much faster to follow than rules over characters. So a rule that refers to itself at its end becomes
a repetition, and each rule without any other recursion a terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable

from batching.errors import GrammarError

_MAX_DEPTH = 500  # nested brackets
_ESCAPE = r'\\(?:[trn"\\\[\]-]|x[\dA-Fa-f]{2}|u[\dA-Fa-f]{4}|U[\dA-Fa-f]{8})'
_SYNTAX = re.compile(
    rf"""
      (?P<blank>\s+ | \#[^\n]*)
    | (?P<bracket>[()])
    | (?P<sign>[|*+?])
    | (?P<any>\.)
    | (?P<token>!?<[^<>]*>)
    | (?P<text>"(?:[^"\\]|{_ESCAPE})*")
    | (?P<class>\[(?:[^\]\\]|{_ESCAPE})*\])
    | (?P<times>\{{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d+)?\s*)?\}})
    | (?P<rule>[A-Za-z\d_-]+)\s*::=
    | (?P<name>[A-Za-z\d_-]+)
    """,
    re.VERBOSE,
)
Part = tuple[str, str]  # its kind, and its text in Lark; names are still GBNF's
_NAMED = {"t": "\t", "r": "\r", "n": "\n"}


def gbnf_to_lark(gbnf: str) -> str:
    """A GBNF grammar with a rule ``root``, as Lark. Raises GrammarError with line and reason."""
    try:
        rules = _read(gbnf)
        if "root" not in rules:
            raise ValueError("it has no rule 'root'")
        used = (name for parts in rules.values() for kind, name in parts if kind == "name")
        missing = [name for name in used if name not in rules]
        if missing:
            raise ValueError(f"it has no rule {missing[0]!r}")
    except ValueError as error:
        raise GrammarError(
            f"the grammar does not parse: {error}; it starts with {gbnf[:60]!r}; "
            f"see llama.cpp's grammars/README.md for GBNF"
        ) from None
    rules = {name: _repeated(name, parts) for name, parts in rules.items()}
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)}
    lines = ["%llguidance {}", f"start: {names['root']}"]
    for name, parts in rules.items():
        body = " ".join([names[text] if kind == "name" else text for kind, text in parts])
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines)


def _read(gbnf: str) -> dict[str, list[Part]]:
    """The parts of each rule."""
    rules: dict[str, list[Part]] = {}
    parts: list[Part] = []
    at = depth = 0
    while at < len(gbnf):
        match = _SYNTAX.match(gbnf, at)
        if match is None or not (rules or match["rule"] or match["blank"]):
            line = gbnf.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: unexpected {gbnf[at : at + 30]!r}")
        at, kind = match.end(), match.lastgroup or ""
        if match["rule"]:
            if depth:
                raise ValueError(f"{depth} ( are not closed")
            _end(parts)
            parts = rules[match["rule"]] = []
        elif match["times"]:
            least, most = int(match["least"]), match["most"]
            if most and int(most) < least:
                raise ValueError(f"in {match[0]} the minimum exceeds the maximum")
            parts.append(("sign", re.sub(r"\s", "", match["times"])))
        elif not match["blank"]:
            depth += (match[0] == "(") - (match[0] == ")")
            if not 0 <= depth <= _MAX_DEPTH:
                many = f"brackets are nested more than {_MAX_DEPTH} deep"
                raise ValueError(many if depth > 0 else "a ) too many")
            if match[0] in "|)":
                _end(parts)
            parts.append((kind, _part(kind, match[0])))
    if depth:
        raise ValueError(f"{depth} ( are not closed")
    _end(parts)
    return rules


def _end(parts: list[Part]) -> None:
    """End an alternative; an empty one must be written in Lark."""
    if not parts or parts[-1][1] in ("|", "("):
        parts.append(("text", '""'))


def _part(kind: str, text: str) -> str:
    if kind == "any":
        return r"/(?s:.)/"
    if kind == "text":
        return json.dumps("".join(_characters(text[1:-1])))
    if kind == "class":
        negation = "^" if text[1] == "^" else ""
        items = re.findall(rf"{_ESCAPE}|.", text[1 + len(negation) : -1], re.DOTALL)
        if not items:
            raise ValueError("[] allows no character" if not negation else "[^] names none")
        return f"/[{negation}{''.join(map(_class_item, items))}]/"
    if kind == "token" and text.startswith("!"):
        if not (match := re.fullmatch(r"!<\[(\d+)\]>", text)):
            raise ValueError(f"{text} is not supported; give the token's id, as in !<[5]>")
        return f"<[^{match[1]}]>"
    return text


def _class_item(item: str) -> str:
    """A character of a class, or the - between two of them."""
    if item == "-":
        return "-"
    return rf"\x{{{ord(next(iter(_characters(item)))):x}}}"


def _characters(text: str) -> Iterable[str]:
    for item in re.findall(rf"{_ESCAPE}|.", text, re.DOTALL):
        if len(item) > 2:
            code = int(item[2:], 16)
            if code > sys.maxunicode or 0xD800 <= code < 0xE000:
                raise ValueError(f"{item} is no character")
            yield chr(code)
        else:
            yield _NAMED.get(item[1], item[1]) if len(item) == 2 else item


def _repeated(name: str, parts: list[Part]) -> list[Part]:
    """``a name | b`` as ``(a)* (b)``: llguidance keeps an item for each level of a recursion."""
    alternatives, depth = [list[Part]()], 0
    for part in parts:
        depth += (part[1] == "(") - (part[1] == ")")
        if part[1] == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    before = [one[:-1] for one in alternatives if one[-1] == ("name", name) and len(one) > 1]
    last = [one for one in alternatives if one[-1] != ("name", name)]
    if not before or not last:
        return parts
    return [*_either(before), ("sign", "*"), *_either(last)]


def _either(alternatives: list[list[Part]]) -> list[Part]:
    found: list[Part] = [("bracket", "(")]
    for alternative in alternatives:
        found += [*alternative, ("sign", "|")]
    return [*found[:-1], ("bracket", ")")]


def _terminals(rules: dict[str, list[Part]]) -> set[str]:
    """The rules that describe a regular expression: without tokens, and without recursion."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    n_open = dict.fromkeys(rules, 0)  # rules that each uses, and that are not found yet
    for name, parts in rules.items():
        for used in {text for kind, text in parts if kind == "name"}:
            users[used].append(name)
            n_open[name] += 1
        n_open[name] += any(kind == "token" for kind, _ in parts)
    found = [name for name, n in n_open.items() if n == 0]
    for name in found:  # which grows
        for user in users[name]:
            n_open[user] -= 1
            if n_open[user] == 0:
                found.append(user)
    return set(found)
