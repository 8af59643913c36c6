"""A method of one's own, used from Python: drafts shown in brackets, and how many were accepted.

python examples/use_from_python.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from speculation import Engine

# This folder's bigrams.py. In a script that imports it, give the object: method=bigrams.spec.
METHOD = f"{Path(__file__).parent / 'bigrams.py'}:spec:length=6"
MESSAGE = "Repeat this three times: The quick brown fox jumps over the lazy dog."


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "bundled"
    with Engine.load(model, n_ctx=2048) as engine:
        reply = engine.chat(MESSAGE, method=METHOD, max_tokens=100)
        for token in reply:
            print(f"[{token.text}]" if token.drafted else token.text, end="", flush=True)
        plain = engine.chat(MESSAGE, method="ar", max_tokens=100).run()
    stats = reply.stats
    print(f"\n{stats.tokens_per_step:.2f} tokens per step, {stats.acceptance_rate:.0%} accepted")
    print(f"The text of plain decoding is {'the same' if plain.text == reply.text else 'another'}.")


if __name__ == "__main__":
    main()
