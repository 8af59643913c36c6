"""Small chat templates, each with calls in the style of a family of models, and the same two calls
as such a model writes them."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A chat template, a reply that calls ``add`` and ``now``, and the control tokens in it."""

    template: str
    calls: str
    marks: tuple[str, ...] = ()


def turns(calls: str, end: str = "<|im_end|>") -> str:
    """A template whose replies have ``calls`` after their content. N is a line break."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}N{{ m.content }}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}{end}N{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistantN{% endif %}"
    )
    return text.replace("N", r"{{ '\n' }}")


def each(call: str) -> str:
    """For each call; NAME and ARGUMENTS are the function's, as JSON."""
    call = call.replace("NAME", "{{ f.name }}").replace("ARGUMENTS", "{{ f.arguments|tojson }}")
    return f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% endfor %}}"


def one_by_one(argument: str) -> str:
    """For each argument; KEY and VALUE are the argument's."""
    argument = argument.replace("KEY", "{{ k }}").replace(
        "VALUE", "{{ v if v is string else v|tojson }}"
    )
    return f"{{% for k, v in f.arguments|items %}}{argument}{{% endfor %}}"


NOTATION = (
    '{% macro written(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, x in v|dictsort %}{% if not loop.first %},{% endif %}{{ k }}:{{ written(x) }}"
    "{% endfor %}}{% elif v is iterable %}[{% for x in v %}{% if not loop.first %},{% endif %}"
    "{{ written(x) }}{% endfor %}]{% else %}{{ v|tojson }}{% endif %}{% endmacro %}"
)
HERMES = (
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, "}"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)

FAMILIES = {
    "json between marks": Family(
        turns(each('N<tool_call>N{"name": "NAME", "arguments": ARGUMENTS}N</tool_call>')), HERMES
    ),
    "json after a tag, one call": Family(
        turns(
            "{% if m.tool_calls|length > 1 %}{{ raise_exception('one call') }}{% endif %}"
            "{% if x is defined %}<|python_tag|>{% endif %}"
            + each('{"name": "NAME", "parameters": ARGUMENTS}')
        ),
        '<|python_tag|>{"name": "add", "parameters": {"a": [1, "}"]}}; '
        '{"name": "now", "parameters": {}}',
        ("<|python_tag|>",),
    ),
    "a list of json, with ids": Family(
        turns(
            "[TOOL_CALLS]["
            + each(
                "{% if c.id|length != 9 %}{{ raise_exception('id') }}{% endif %}"
                '{"name": "NAME", "arguments": ARGUMENTS, "id": "{{ c.id }}"}'
                '{{ ", " if not loop.last else "]" }}'
            ),
            "{{ eos_token }}",
        ),
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": [1, "}"]}, "id": "abcdefgh1"}, '
        '{"name": "now", "arguments": {}, "id": "abcdefgh2"}]',
        ("[TOOL_CALLS]",),
    ),
    "names and json between marks": Family(
        turns(each("[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]ARGUMENTS"), "{{ eos_token }}"),
        '[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": [1, "}"]}'
        "[TOOL_CALLS]now[CALL_ID]abcdefgh2[ARGS]{}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "an element for each argument": Family(
        turns(
            each(
                "N<tool_call>N<function=NAME>N"
                + one_by_one("<parameter=KEY>NVALUEN</parameter>N")
                + "</function>N</tool_call>"
            )
        ),
        '<tool_call>\n<function=add>\n<parameter=a>\n[1, "}"]\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "keys and values in elements": Family(
        turns(
            each(
                "N<tool_call>NAMEN"
                + one_by_one("<arg_key>KEY</arg_key>N<arg_value>VALUE</arg_value>N")
                + "</tool_call>"
            ),
            "",
        ),
        '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>[1, "}"]</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "elements in one block": Family(
        turns(
            "N<x:tool_call>N"
            + each(
                '<invoke name="NAME">N'
                + one_by_one('<parameter name="KEY">VALUE</parameter>N')
                + "</invoke>N"
            )
            + "</x:tool_call>"
        ),
        '<x:tool_call>\n<invoke name="add">\n<parameter name="a">[1, "}"]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</x:tool_call>',
    ),
    "elements that tell strings": Family(
        turns(
            "<calls>N"
            + each(
                '<invoke name="NAME">N'
                + one_by_one('<p name="KEY" string="{{ (v is string)|tojson }}">VALUE</p>N')
                + "</invoke>N"
            )
            + "</calls>"
        ),
        '<calls>\n<invoke name="add">\n<p name="a" string="false">[1, "}"]</p>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</calls>',
    ),
    "marks around everything": Family(
        turns("<|calls|>" + each("<|call|>NAME<|sep|>ARGUMENTS<|/call|>") + "<|/calls|>"),
        '<|calls|><|call|>add<|sep|>{"a": [1, "}"]}<|/call|>'
        "<|call|>now<|sep|>{}<|/call|><|/calls|>",
        ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
    ),
    "a block of code": Family(
        turns(
            "<|calls|>"
            + each(
                "{% if not loop.first %}N{% endif %}"
                "<|call|>{{ c.type }}<|sep|>NAMEN```jsonNARGUMENTSN```<|/call|>"
            )
            + "<|/calls|>"
        ),
        '<|calls|><|call|>function<|sep|>add\n```json\n{"a": [1, "}"]}\n```<|/call|>\n'
        "<|call|>function<|sep|>now\n```json\n{}\n```<|/call|><|/calls|>",
    ),
    "numbered calls": Family(
        turns(
            "<|calls|>"
            + each("<|call|>functions.NAME:{{ loop.index0 }}<|args|>ARGUMENTS<|/call|>")
            + "<|/calls|>"
        ),
        '<|calls|><|call|>functions.add:0<|args|>{"a": [1, "}"]}<|/call|>'
        "<|call|>functions.now:1<|args|>{}<|/call|><|/calls|>",
    ),
    "ids that name the tool": Family(
        turns(each("<|call|>{{ c.id }}<|args|>ARGUMENTS<|/call|>")),
        '<|call|>functions.add:0<|args|>{"a": [1, "}"]}<|/call|>'
        "<|call|>functions.now:1<|args|>{}<|/call|>",
    ),
    "bare keys": Family(
        NOTATION + turns(each("<|tool_call>call:NAME{{ written(f.arguments) }}<tool_call|>")),
        '<|tool_call>call:add{a:[1,<|"|>}<|"|>]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "none": Family(turns(""), HERMES),
}

CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments|tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{# <|channel|>analysis<|message|> #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
