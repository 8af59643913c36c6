"""Errors of the endpoint: OpenAI's form, with llama-server's types and status codes."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.worker.messages import Failed

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_STATUS = {"invalid": 400, "too long": 400, "no model": 503, "busy": 503, "late": 504, "error": 500}


_repr = Repr()
_repr.maxstring = _repr.maxother = 60
repr_of = _repr.repr  # looks at the beginning alone: a value may have 64 MB


class ApiError(Exception):
    """A request that gets no reply. ``facts`` are further fields of the error."""

    def __init__(self, message: str, status: int = 400, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.facts = facts

    @classmethod
    def of(cls, failed: Failed) -> ApiError:
        """The error for a job that failed."""
        message, status = failed.flags_message or failed.message, _STATUS[failed.kind]
        if failed.kind == "too long":
            return cls(
                message,
                status,
                type="exceed_context_size_error",
                n_prompt_tokens=failed.requested,
                n_ctx=failed.available,
            )
        return cls(message, status)

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.status, **self.facts)


def error_body(message: str, status: int, **facts: Any) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status, **facts}}


def handle_errors(app: FastAPI) -> None:
    """Let ``app`` answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(_worded(error), 400), 400)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code)


def _worded(error: RequestValidationError) -> str:
    """What is wrong with which field, for the first few of them."""
    found = []
    for one in error.errors()[:3]:
        where = ".".join(str(part) for part in one["loc"] if part != "body")
        value = f" (got {repr_of(one['input']):.60})" if one["type"] != "missing" else ""
        found.append(f"{where or 'the body'}: {one['msg']}{value}")
    return "; ".join(found)
