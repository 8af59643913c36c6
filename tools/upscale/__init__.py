"""python -m tools.upscale: a small model's behaviour at a large model's cost.

A method's speed-up depends on what the model writes and on the cost of a row. This tool separates
the two: from a Llama-architecture GGUF it makes a wider and deeper one that computes the same
function (function-preserving upscaling). The logits, and so the texts, drafts and acceptance, are
the small model's, while the matrices have the requested size. The result knows no more than the
source; its metadata say so.

How the function is preserved, with d the source's width and D the new one:

- The hidden state is zero in the new D - d dimensions, and so are the columns of the embedding and
  the rows of the matrices that write to it (attn_output, ffn_down).
- RMSNorm now averages over D values, of which d are nonzero: sum / D + eps' is d/D of
  sum / d + eps if eps' = eps * d/D. A factor sqrt(d/D) in the norms' weights compensates.
- Heads keep their size, so RoPE and the softmax scale do not change. New heads and new hidden units
  compute something, but the columns that would read them are zero.
- New layers add nothing: their attn_output and ffn_down are zero.
- All other new weights are small random numbers, so that zeros cannot make them cheaper.

``shape`` has the sizes, ``tensors`` the plan for each tensor, ``gguf_file`` reads and writes.
Nothing here loads a model into llama.cpp.
"""
