"""The recipe of the bundled chat model: data to text, text to tokens, tokens to weights, to GGUF.

One concept a file, in the order data flows: `corpus` (the sources), `tasks` (exercises made from
them), `persona` (who the model says it is), `tokenizer`, `rows` (what a training batch holds),
`model`, `muon`, `train`, `export`, `evaluate`. It knows nothing of the app that ships its result.
"""
