"""Takes llama-server's flags and runs our endpoint with them: for llama.cpp's own server tests.

In the folder ``tools/server/tests`` of llama.cpp's source, which is also in llama-cpp-python's:

    LLAMA_SERVER_BIN_PATH=…/run SPECULATION_MODEL=…/stories260K.gguf \\
        python -m pytest unit/test_chat_completion.py

where ``run`` is a script, ``exec …/.venv/bin/python …/tools/as_llama_server.py "$@"``. To test a
server that runs already, start it with this file and these flags:

    --port 8080 --temp 0.8 --seed 42 --ctx-size 512 --parallel 2 --alias tinyllama-2

and give pytest ``DEBUG_EXTERNAL=1 PORT=8080``.

docs/endpoint.md says which of them pass, and why the others do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Its flags with a value that we have too, and our names.
SAME = ("host", "port", "alias", "parallel", "api-key", "threads")
OURS = {"ctx-size": "ctx", "chat-template-file": "chat-template", **{name: name for name in SAME}}

# llama-server's template for a model that has none.
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def arguments(given: list[str]) -> list[str]:
    """Our flags for those of llama-server; others are ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (*OURS, "temp", "seed", "chat-template"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--cors-origins", default="*")
    parser.add_argument("--no-ui", action="store_true")
    flags, _ = parser.parse_known_args(given)
    found = ["--model", os.environ["SPECULATION_MODEL"], "--no-browser"]
    found += ["--sampling", f"temperature={flags.temp},seed={flags.seed},top_k=40,top_p=0.95,"
              "min_p=0.05"]  # fmt: skip
    if flags.no_ui or "SPECULATION_PAGE" not in os.environ:
        found.append("--no-page")
    if flags.chat_template_file is None:
        # A template that is no template text, as one of the tests has, stands for itself.
        text = flags.chat_template or "chatml"
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write(CHATML if text.isalnum() else text)
        flags.chat_template_file = file.name
    if flags.cors_origins != "localhost":  # which have access in any case
        found += ["--allow-host", flags.cors_origins]
    given_values = vars(flags)
    for theirs, ours in OURS.items():
        value = given_values[theirs.replace("-", "_")]
        if value is not None:
            found += [f"--{ours}", value]
    return found


if __name__ == "__main__":
    command = [sys.executable, "-m", "app", *arguments(sys.argv[1:])]
    os.environ["PYTHONPATH"] = str(ROOT)
    os.execv(sys.executable, command)
