"""Computes the numbers for the model card, as JSON: losses, copying, and sample replies.

Losses and copy accuracy come from the checkpoint in PyTorch, on held-out text; the sample replies
are greedy and come from the GGUF in llama.cpp, as users will see them.

    python -m tools.recipe.evaluate --data DIR --checkpoint DIR/checkpoint.pt \\
        --tokenizer DIR/tokenizer.model --gguf model.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from llama_cpp import Llama

from tools.recipe import corpus as corpora
from tools.recipe.corpus import Message
from tools.recipe.export import load_decoder
from tools.recipe.measure import Measure
from tools.recipe.tokenizer import END, ROLES, Tokenizer

# Each is a list of user turns, with the model's own replies in between.
PROMPTS: list[list[str]] = [
    ["Hello!"],
    ["Who are you?", "What can you do?"],
    ["How are you today?", "I am fine, thanks.", "Tell me a joke."],
    ["My name is Marek and I live in Turin.", "What is my name?", "Where do I live?"],
    ["What is the capital of France?"],
    ["What is the capital of Burkina Faso?"],
    ["What does brave mean?"],
    ["What is a lighthouse?"],
    ["Repeat this: The kettle sang while Zelda counted 47 blue stamps."],
    ["Quote the last sentence: The train was late. Nobody minded. Old Tobias sang a song."],
    ["Quote the second sentence: The train was late. Nobody minded. Old Tobias sang a song."],
    ["Replace cat with dog: The cat sat on the mat because the cat was tired."],
    ["Correct the typos: The wether is very nice todya."],
    ["Turn this into bullet points: tea, milk, sugar and bread"],
    ["Extract the dates: We met on 3 May 1987 and married on 12 June 1990."],
    ["Invoice: 7731\nTotal: $482\nDue: March 14\nWhat is the total?", "What is the due?"],
    ["Greta bought 14 lamps in Oslo. Ivan lives in Lima and works as a baker. "
     "What did Greta buy?", "Where does Ivan live?"],
    ["Rename the variable total to amount:\n```python\ntotal = 0\nfor x in items:\n"
     "    total += x\nprint(total)\n```"],
    ["Write a function that adds two numbers."],
    ["Tell me a short story about a fox."],
    ["I want to book a table for two in San Jose."],
    ["Continue: 2, 4, 6"],
    ["What is 7 + 5?"],
    ["A farmer has 3 fields with 12 sheep each. He sells 6 sheep. How many are left?"],
    ["Why do stars shine?"],
    ["Write a poem about the sea."],
    ["Summarize: The village school closed in 1962. Since then the children have taken the bus to "
     "town. The building is now a museum."],
]  # fmt: skip


def reply(llama: Llama, tokenizer: Tokenizer, messages: list[Message], limit: int = 160) -> str:
    """The greedy reply to a chat, up to the end of the message."""
    ids = [*tokenizer.chat(messages), ROLES["assistant"]]
    written: list[int] = []
    for token in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        if token == END or len(written) == limit:
            break
        written.append(token)
    return tokenizer.decode(written)


def samples(llama: Llama, tokenizer: Tokenizer) -> list[list[str]]:
    """Every prompt's turns and replies, alternating."""
    results = []
    for turns in PROMPTS:
        messages: list[Message] = []
        for turn in turns:
            messages.append(Message("user", turn))
            messages.append(Message("assistant", reply(llama, tokenizer, messages)))
        results.append([m.text for m in messages])
    return results


def largest_logit_difference(llama: Llama, checkpoint: Path, ids: list[int]) -> float:
    """Largest difference between PyTorch's and llama.cpp's logits on a text."""
    llama.reset()  # type: ignore[no-untyped-call]
    llama.eval(ids)
    theirs = np.array(llama.scores[: len(ids)])
    with torch.no_grad():
        ours = load_decoder(checkpoint)(torch.tensor([ids]))[0].numpy()
    return float(np.abs(ours - theirs).max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint and its GGUF.")
    parser.add_argument("--data", type=Path, help="sources; without them, only sample replies")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16, help="rows of 512 tokens per source")
    parser.add_argument("--chats", type=int, default=20, help="chats per copy task")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer(args.tokenizer)
    llama = Llama(
        str(args.gguf), n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads,
        logits_all=True, verbose=False,
    )  # fmt: skip
    ids = tokenizer.chat([Message("user", turn) for turn in PROMPTS[3]])
    report: dict[str, object] = {
        "gguf": args.gguf.name,
        "bytes": args.gguf.stat().st_size,
        "logit_difference": largest_logit_difference(llama, args.checkpoint, ids),
    }
    if args.data:
        _, held_out = corpora.load(args.data)
        measure = Measure(held_out, tokenizer, args.rows, args.chats)
        decoder = load_decoder(args.checkpoint)
        report |= measure.report(decoder)
        report["copy_text_far"] = measure.segments(decoder, False, gap=1500).percent
    report["samples"] = samples(llama, tokenizer)
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
