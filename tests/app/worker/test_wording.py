"""Error messages in the page's terms."""

from __future__ import annotations

import warnings

from app.worker.wording import FIELDS, failure
from batching.errors import ContextError
from speculation.system.console import FLAGS, worded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from app.page.ui import STATIC
    from app.start import parse_flags


def test_errors_call_a_setting_by_its_fields_label() -> None:
    error = ContextError(
        "200 tokens; lower {n_ctx} or use {kv_type} q8_0", settings=("n_ctx", "kv_type")
    )
    told = failure(error)
    assert told.message == "200 tokens; lower “Context” under Models or use “KV cache” q8_0"
    assert told.flags_message == "200 tokens; lower --ctx or use --kv-type q8_0"
    assert worded(error) == "200 tokens; lower --ctx or use --kv-type q8_0"
    assert str(error) == "200 tokens; lower n_ctx or use kv_type q8_0"


def test_the_labels_and_flags_in_messages_exist() -> None:
    page = "".join((STATIC / name).read_text() for name in ("models.js", "main.html"))
    labels = {name.split("”")[0][1:] for name in FIELDS.values() if name.startswith("“")}
    assert {label for label in labels if f'"{label}"' not in page} == set()
    flags = {f"--{name.replace('_', '-')}" for name in vars(parse_flags([]))}
    assert {name for name in (*FIELDS.values(), *FLAGS.values()) if name[0] == "-"} <= flags
