"""python -m tools.compare DIR: speed ratios of our methods to llama.cpp's own programs.

Both sides use the same GGUF, prompts, threads, context, KV cache, flash attention and number of
tokens, and decode greedily. Program and method alternate, and so does which runs first (theirs,
ours, ours, theirs), so that machine drift favours neither. What is compared:

- ``llama-lookahead`` and ``llama-lookup`` start timing at the first generated token, which comes
  with the prompt, and so do we.
- ``llama-speculative-simple`` decodes the last prompt token in a step of its own, and counts that
  step and all its tokens.
- ``llama-bench`` decodes as many tokens as plain decoding generates after its first, at the same
  depth. It decodes random tokens and does no sampling; ours includes sampling.
- The programs sample with top-k 1, their cheapest way of greedy decoding.

``programs`` finds, runs and parses the programs, ``pairs`` measures, ``report`` formats, ``mode``
runs it all and writes the JSON.
"""
