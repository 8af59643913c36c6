"""python -m speculation.bench: each method's speed-up over plain decoding on this machine.

How it measures:

- Every turn of a conversation is measured as a prompt of its own. The replies before it are plain
  decoding's for every method, so all methods see the same tokens.
- A round runs every method once on one prompt. The order rotates from round to round, so that
  machine drift favours none. The cache is emptied before each run, so all prefills are the same.
- Tokens per second are the tokens after the first step over the decode seconds, for every method
  including plain decoding. An end-of-generation token counts.
- The speed-up of a prompt is the ratio of the medians over the repeats; mean and standard deviation
  are over prompts.
- Every text is compared with plain decoding's, token by token. A difference is reported with the
  gap between the two tokens' logits, recomputed by plain decoding.

``options`` reads the flags, ``prompt_file`` the prompts, ``run`` measures, ``results`` has the data
of a run, ``summary`` the statistics; ``report``, ``plot`` and ``json_file`` write output.
"""
