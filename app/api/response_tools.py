"""The tools of a response: functions, tools that take a text, and namespaces of both, made into the
functions that a chat completion has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from app.api.errors import ApiError, unsupported
from app.api.requests import Choice, Tool, ToolChoice

_DEFAULT = "functions"  # OpenAI's name for what is in no namespace
_LONGEST = 64  # characters of a name
_CALLED = ("function", "custom", "tool_search")  # types of tools that a client runs


class Offered:
    """The tools that a model is offered, each under a name of its own.

    functions  as a chat completion has them, and the types of tools that nobody here can run
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.functions: list[Tool] = []
        self._names: dict[tuple[str, str], str] = {}  # by namespace and name
        self._calls: dict[str, dict[str, Any]] = {}  # by the name that the model knows
        self._offer_all(tools)

    def define(self, tools: Iterable[Tool]) -> str:
        """Offer what a search for tools found. Returns the definitions, for a message."""
        n_listed = len(self.functions)
        self._offer_all(tools)
        new, found = self.functions[n_listed:], Offered(tools).functions
        for listed in (new, found):  # where the names are the tools' own
            told = [tool.defined() for tool in listed if tool.type == "function"]
        return "\n".join(told)

    def _offer_all(self, tools: Iterable[Tool]) -> None:
        for tool in tools:
            if tool.type != "namespace":
                self._offer(tool)
                continue
            about = tool.description
            for inner in tool.tools:
                self._offer(inner, tool.name, about)
                about = ""  # once is enough

    def _offer(self, tool: Tool, namespace: str = "", about: str = "") -> None:
        call: dict[str, Any] = {"type": "function_call", "name": tool.name, "arguments": ""}
        parameters, told = tool.parameters, [about, tool.description]
        if tool.type == "custom":
            call = {"type": "custom_tool_call", "name": tool.name, "input": ""}
            text = {"type": "string"}
            parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            if tool.format.definition:
                told.append(f"The input follows this grammar:\n{tool.format.definition}")
        elif tool.type == "tool_search" and tool.execution == "client":
            call = {"type": "tool_search_call", "execution": "client", "arguments": {}}
        elif tool.type != "function":
            self.functions.append(tool)
            return
        known = namespace, tool.name or tool.type
        if known in self._names:  # found by two searches
            return
        name = _flat(*known)
        name = _short(name, namespace) if name in self._calls else name
        self._names[known] = name
        self._calls[name] = {**call, "namespace": namespace} if namespace else call
        about = "\n\n".join(filter(None, told))
        made = Tool(name=name, description=about, parameters=parameters, strict=tool.strict)
        self.functions.append(made)

    def name(self, namespace: str, name: str) -> str:
        """The name under which the model knows a tool, or would."""
        return self._names.get((namespace, name)) or _flat(namespace, name)

    def call(self, name: str) -> dict[str, Any]:
        """The item of a call, without an id and what the tool is given."""
        plain = {"type": "function_call", "name": name, "arguments": ""}
        return {**self._calls.get(name, plain)}

    def choice(self, choice: Choice) -> Choice:
        """The choice as a chat completion has it. Raises ApiError."""
        if isinstance(choice, str):
            return choice
        if choice.type != "allowed_tools":
            return ToolChoice(name=self._chosen(choice))
        some = [ToolChoice(name=self._chosen(o)) for o in choice.tools if o.type in _CALLED]
        return choice.model_copy(update={"tools": some})

    def _chosen(self, choice: ToolChoice) -> str:
        if choice.type not in _CALLED:
            raise unsupported(
                "tool_choice", f"tools of the type {choice.type!r:.40} do not run here"
            )
        wanted = choice.name or choice.type
        for (namespace, name), known in self._names.items():
            if wanted in (name, known) and choice.namespace in (None, namespace):
                return known
        raise ApiError(
            f"tool_choice names {wanted!r:.80}, which is not among the tools", param="tool_choice"
        )


def _flat(namespace: str, name: str) -> str:
    """A tool's name together with its namespace's."""
    if namespace not in ("", _DEFAULT):
        name = f"{namespace.rstrip('_')}__{name}"
    return name if len(name) <= _LONGEST else _short(name, namespace)


def _short(name: str, namespace: str) -> str:
    """Another name, which no other tool has."""
    digest = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9]}_{digest}"
