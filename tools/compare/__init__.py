"""--compare-llama-cpp DIR: our methods beside llama.cpp's own programs, as speed ratios.

The same GGUF, prompts, threads, context, KV cache and flash attention on both sides, greedy, the
same number of tokens. Program and method take turns, and who begins alternates from pair to pair
(theirs, ours, ours, theirs), so that drift of the machine favours neither. What is compared:

- ``llama-lookahead`` and ``llama-lookup`` count from the first generated token on, which comes with
  the prompt, and so do we.
- ``llama-speculative-simple`` decodes the last token of the prompt in a step of its own, which it
  counts with all that it yields.
- ``llama-bench`` decodes as many tokens as plain decoding generates after the first, after as many
  as the prompt has. It takes random tokens and chooses none, which ours includes. Its first run
  counts, which follows a prompt that was read, as ours does; its second, which does not, is shown
  beside it.
- The programs choose tokens by top-k 1, their cheapest way to take the likeliest one.

``programs`` finds, starts and reads the programs, ``pairs`` measures, ``libraries`` tells whether
both sides run the same llama.cpp, ``report`` shows, ``mode`` is the whole from flags to JSON.
"""
