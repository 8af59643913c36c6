"""Records what a model writes, and replays it under any policy and any cost (docs/measure.md).

A policy's result depends on the text, on what its sources would draft and on what a batch costs,
but not on who computes the logits. So a text is recorded once, with the model's likeliest
successors and the draft model's tree at every position, and then played through the real decode
loop, drafters and ``auto`` against a target that only reads the recording. Time is simulated.
"""
