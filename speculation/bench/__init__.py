"""python -m speculation.bench: what each method gains over plain decoding, on this machine.

How the numbers come about:

- Every turn of a conversation is measured on its own, as a prompt of its own. What the assistant
  said before it is what plain decoding replied, for every method, so all see the same tokens.
- A round runs every method once on one prompt; the order rotates from round to round, so that
  drift of the machine favours none. The cache is emptied before each run: all prefill alike.
- Tokens per second are generated tokens over decode seconds for every method, plain decoding
  included: the first token and an end-of-generation token count, the prefill does not.
- The speed-up of a prompt is the ratio of the medians over the repeats; mean and standard deviation
  are over prompts.
- Every text is compared with plain decoding's, token by token. A difference is reported with the
  gap between the two tokens' logits, computed again by plain decoding.

``options`` reads the flags, ``prompt_file`` the prompts, ``run`` measures, ``results`` is what one
run yielded, ``summary`` the statistics, ``report`` and ``json_file`` what is shown and kept.
"""
