"""Errors of the endpoint: OpenAI's form, with llama-server's types and status codes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from app.api.answers import as_json
from app.worker.messages import Failed

_TYPES = {
    **dict.fromkeys((400, 405, 413, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_STATUS = {"invalid": 400, "too long": 400, "no model": 503, "busy": 503, "late": 504, "error": 500}
TOO_LONG = "context_length_exceeded"  # OpenAI's code for a prompt that does not fit

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
repr_of = _repr.repr  # looks at the beginning alone: a value may have 64 MB


class ApiError(Exception):
    """A request that gets no reply. ``facts`` are further fields of the error, such as ``param``,
    the request's field that is wrong."""

    def __init__(self, message: str, status: int = 400, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.facts = facts

    @classmethod
    def of(cls, failed: Failed) -> ApiError:
        """The error for a job that failed."""
        message, status = failed.flags_message or failed.message, _STATUS[failed.kind]
        if failed.kind == "too long":  # clients look for these words, or for OpenAI's code
            return cls(
                f"The request exceeds the available context size: {message}",
                status,
                type="exceed_context_size_error",
                code=TOO_LONG,
                n_prompt_tokens=failed.requested,
                n_ctx=failed.available,
            )
        return cls(message, status, param=failed.param)

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.status, **self.facts)


def unsupported(field: str, why: str) -> ApiError:
    """The error for a field that would change the reply and is not supported."""
    return ApiError(f"{field} is not supported: {why}", param=field)


def error_body(message: str, status: int, **facts: Any) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status, **facts}}


_ANTHROPIC = re.compile(r"(/v1)?/messages(/count_tokens)?")  # its paths …
_ANTHROPIC_TYPES = {  # … and its types of errors, where they are not OpenAI's
    **{status: _TYPES[status] for status in (400, 401, 403, 404, 415)},
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body_for(path: str, message: str, status: int, **facts: Any) -> dict[str, Any]:
    """An error in the form of the API that ``path`` belongs to: Anthropic's or OpenAI's."""
    if not _ANTHROPIC.fullmatch(path):
        return error_body(message, status, **facts)
    if facts.get("code") == TOO_LONG:  # agents look for these words, and shorten their prompt
        counts = f"{facts['n_prompt_tokens']} tokens > {facts['n_ctx']} maximum"
        message = f"prompt is too long: {counts}. {message}"
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def handle_errors(app: FastAPI) -> None:
    """Let ``app`` answer every error in the form of the API that was asked."""

    def answer(http: Request, message: str, status: int, **facts: Any) -> Response:
        return as_json(error_body_for(http.url.path, message, status, **facts), status)

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
        return answer(http, error.message, error.status, **error.facts)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)  # of a request in another API's words
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        message, param = _worded(error)
        return answer(http, message, 400, param=param)

    @app.exception_handler(HTTPException)
    async def failed(http: Request, error: HTTPException) -> Response:
        path, message, headers = http.url.path, str(error.detail), error.headers
        if error.status_code == 404:
            why = f"This server has no address {path!r:.100}."
            message = f"{why} docs/endpoint.md lists its addresses."
        elif error.status_code == 405:
            allowed = ", ".join(_methods(app, http.scope))
            message, headers = f"{path} takes {allowed}, not {http.method:.20}.", {"Allow": allowed}
        found = answer(http, message, error.status_code)
        found.headers.update(headers or {})
        return found

    @app.exception_handler(Exception)
    async def unexpected(http: Request, error: Exception) -> Response:
        return answer(http, f"unexpected {type(error).__name__}: {error}", 500)


def answer_errors(app: FastAPI, statuses: Mapping[type[Exception], int]) -> None:
    """Let ``app`` answer these errors, each with its own words and a status."""

    async def answer(http: Request, error: Exception) -> Response:
        status = next(statuses[kind] for kind in type(error).mro() if kind in statuses)
        return as_json(error_body(str(error), status), status)

    for kind in statuses:
        app.add_exception_handler(kind, answer)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Those that a path takes."""
    return [
        method
        for method in ("DELETE", "GET", "PATCH", "POST")
        if any(one.matches({**scope, "method": method})[0] is Match.FULL for one in app.routes)
    ]


_TYPE_NAMES = ("str", "int", "float", "bool", "nullable")


def _worded(error: RequestValidationError | ValidationError) -> tuple[str, str | None]:
    """What is wrong with which fields, for the first few of them, and the name of the first."""
    found: dict[str | None, str] = {}
    # A field of several types has an error for each of them; most are that it is not of the type,
    # and what is wrong deeper in it tells more.
    for one in sorted(
        error.errors(), key=lambda one: (one["type"].endswith("_type"), -len(one["loc"]))
    ):
        if one["type"] == "json_invalid":
            reason = one.get("ctx", {}).get("error", one["msg"])
            return f"the body is not JSON: {reason} at character {one['loc'][-1]}", None
        value = f" (got {repr_of(one['input']):.60})" if one["type"] != "missing" else ""
        name = _param([part for part in one["loc"] if part != "body"])
        if not any(str(other).startswith(name or "None") for other in found):
            found[name] = f"{one['msg']}{value}"
    fields = list(found)[:3]
    return "; ".join(f"{name or 'the body'}: {found[name]}" for name in fields), fields[0]


def _param(where: Sequence[str | int]) -> str | None:
    """A field as OpenAI names it, ``messages[0].role``. The type that follows a field of several
    types is left out: ``stop.list[str]``."""
    name = ""
    for part in where:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _TYPE_NAMES and re.fullmatch("[a-z_][a-z0-9_]*", part):
            name += f".{part}" if name else part
    return name or None
