"""The page on a fake backend, whose replies take the time it says: ``python -m`` this module."""

from __future__ import annotations

import argparse
import dataclasses
import time

from fastapi import FastAPI

from app import server
from app.guard import LARGEST_BODY, Guard, Names
from app.page import ui
from app.worker.events import Events
from app.worker.messages import ChatRequest, ModelSpec, Tokens
from tests.support.fake_backend import DONE, FakeBackend, played


class TwiceAsFast(FakeBackend):
    """Every reply has 84 tokens; the method ``guess`` takes a second, plain decoding two."""

    def reply(self, request: ChatRequest) -> Events:
        seconds = 2.0 if request.method == "ar" else 1.0
        done = dataclasses.replace(DONE, method=request.method, decode_seconds=seconds)
        return played([Tokens((("yes ", False), ("indeed", True))), done])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest-body", type=int, default=LARGEST_BODY)
    flags = parser.parse_args()
    app = FastAPI()
    ui.mount(app, ui.build(TwiceAsFast(), ModelSpec("m.gguf"), "guess"))
    listening = server.bind("127.0.0.1", None)
    server.serve(Guard(app, Names("127.0.0.1"), largest=flags.largest_body), listening)
    print(server.address("127.0.0.1", listening), flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
