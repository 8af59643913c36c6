"""python -m tools.upscale: a small model's behaviour at a large model's cost.

What a method gains depends on what the model writes and on what a row costs. This tool sets the two
apart: it takes a Llama-architecture GGUF and writes a wider and deeper one that computes the same
function. Its logits, and so its texts, drafts and acceptance, stay those of the small model, while
every matrix is as large as asked for. It is no larger model and knows no more; its metadata say so.

How the function is kept, d being the source's width and D the new one:

- The hidden state has zeros in the new D - d dimensions: so do the columns of the embedding and the
  rows of the matrices that write to it (attn_output, ffn_down).
- RMSNorm now takes its mean over D values, d of which count: sum / D + eps' is d/D of
  sum / d + eps when eps' = eps * d/D. The norms' weights make up for it with a factor sqrt(d/D).
- Heads keep their size, so RoPE and the softmax's scale stay as they are. New heads and new hidden
  units compute something, but the columns that would read them are zero.
- New layers add nothing: their attn_output and ffn_down are zero.
- All other new weights are small random numbers, so that nothing is cheaper for being zero.

``shape`` has the sizes, ``tensors`` what becomes of each tensor, ``gguf_file`` reads and writes.
Nothing here loads a model into llama.cpp.
"""
