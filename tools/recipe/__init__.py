"""The recipe of the bundled chat model: data to text, text to tokens, tokens to weights, to GGUF.

In the order of the data flow: `corpus` (the sources), `tasks` (exercises made from them), `persona`
(how the model presents itself), `tokenizer`, `rows` (training batches), `model`, `muon`, `train`,
`export`, `evaluate`. Independent of the app that ships the result.
"""
