"""The page's frame in Gradio: chats at the left, the conversation, and a drawer at the right.

What the frame shows comes by the routes under ``/page`` (routes.py) and is drawn by the scripts of
``static``. Only the drawer's fields are Gradio's. There is no state of Gradio's and no queued
event: those keep a connection open for each tab, of which a browser has six to a server.
"""

from __future__ import annotations

import gc
import json
import re
from base64 import b64encode
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import gradio as gr
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, Json, ValidationError
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.guard import PAGE, POLICY, POSTS
from app.page.fields import settings_fields
from app.worker.backend import Backend

STATIC = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
# The green of page.css, and no other.
ICON = (
    "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'>"
    "<rect width='32' height='32' rx='8' fill='%23047857'/><path d='M8 22v-5m5 5V10m6 12v-8m5 8V7'"
    " stroke='white' stroke-width='3' stroke-linecap='round'/></svg>"
)
READY = 'document.dispatchEvent(new Event("part"));'
# The drawer's fields are rendered when it opens (settings.js sends this event).
ON_FIELDS = """
document.addEventListener("fields", ({ detail }) => (props.value = detail));
document.dispatchEvent(new Event("part"));
"""


def build(backend: Backend, method: str | None = None, model: str = "") -> gr.Blocks:
    """Build the page. Without ``method``, it starts with the one last used in the browser.
    ``model`` is what the server is started with."""

    def fields(shown: str) -> None:
        settings_fields(json.loads(shown), backend.methods(), backend.status().facts.sampling)

    page: gr.Blocks
    with gr.Blocks(title="Speculation", fill_height=True, fill_width=True) as page:
        with gr.Sidebar(width=280, elem_id="left"):
            gr.HTML(_text("chats.html"), js_on_load=READY, apply_default_css=False)
        with gr.Sidebar(width=400, elem_id="right", position="right", open=False):
            gr.HTML(_text("drawer.html"), js_on_load=READY, apply_default_css=False)
            shown = gr.HTML(
                "", js_on_load=ON_FIELDS, apply_default_css=False, elem_id="shown-settings"
            )
            with gr.Column(elem_id="fields"):
                render = gr.render([shown], [shown.change], queue=False, show_progress="hidden")
                render(fields)

        data = json.dumps({"method": method or "", "model": model})
        given = f"Object.assign(document.documentElement.dataset, {data});"
        gr.HTML(
            _text("main.html"), js_on_load=given + READY, apply_default_css=False, elem_id="main"
        )
    return page


def mount(app: FastAPI, page: gr.Blocks) -> None:
    """Serve the page from ``app``, at the addresses that its own routes leave."""
    for path in STATIC.iterdir():
        if path.suffix in KINDS:
            _serve(app, f"/page/{path.name}", path.read_bytes(), KINDS[path.suffix])
    head = (
        f'<link rel="icon" href="{ICON}"><link rel="stylesheet" href="page/page.css">'
        f'<script>{_text("frames.js")}</script><script type="module" src="page/start.js"></script>'
    )
    app.add_middleware(_Compressed)
    gr.mount_gradio_app(
        app,
        page,
        "/",
        theme=gr.themes.Base(
            primary_hue="emerald", neutral_hue="zinc", font=SANS, font_mono=MONO, radius_size="md"
        ),
        footer_links=[],
        show_error=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
    )
    mounted: Any = app.routes[-1]
    mounted.app.middleware("http")(partial(_framed, head.encode()))
    gc.freeze()  # a collection that looks at all of Gradio's objects stops everybody for a while


def _serve(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    """Serve a file that browsers keep until it changes."""
    tag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    @app.get(path)
    async def served(request: Request) -> Response:
        if request.headers.get("if-none-match", "").removeprefix("W/") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)


class _Compressed:
    """Compresses what the page loads. The endpoint's answers stay as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._compressed = GZipMiddleware(app, minimum_size=1000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_page = path.startswith("/page/") or PAGE.fullmatch(path) is not None
        app = self._compressed if scope["type"] == "http" and is_page else self._app
        await app(scope, receive, send)


class _Shown(BaseModel):
    """What the page asks Gradio for: the fields of these settings."""

    data: tuple[Json[dict[str, Any]]]
    fn_index: Literal[0]
    trigger_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    session_hash: Annotated[str, Field(max_length=100)] | None = None


async def _framed(head: bytes, http: Request, answer: RequestResponseEndpoint) -> Response:
    """Gradio's answer. The page's document gets its own head, as Gradio would add to the head in
    the browser, after its own scripts; these are allowed. What the page does not ask for is
    refused, as Gradio's answer to odd requests is status 500."""
    if http.url.path in POSTS:
        try:
            asked = _Shown.model_validate_json(await http.body())
        except ValidationError as error:
            why = f"This is not what the page asks for: {error.errors()[0]['msg']}"
            return JSONResponse({"error": why, "detail": why}, 400)
        fields = {**asked.model_dump(), "data": [json.dumps(asked.data[0])]}
        http._body = json.dumps(fields).encode()
    answered: Any = await answer(http)
    if http.url.path != "/":
        return cast("Response", answered)
    body = b"".join([part async for part in answered.body_iterator])
    body = body.replace(b"<head>", b"<head>" + head, 1)
    found = re.findall(rb"<script[^>]*>(.*?)</script>", body, re.DOTALL)
    hashes = [b64encode(sha256(one).digest()).decode() for one in found if one]
    allowed = " ".join(["script-src", *(f"'sha256-{one}'" for one in hashes)])
    answered.headers["content-length"] = str(len(body))
    answered.headers["content-security-policy"] = POLICY.replace("script-src", allowed)
    return Response(body, answered.status_code, dict(answered.headers))


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
