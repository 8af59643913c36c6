"""Records what a model writes, and replays it under any policy and any cost, in seconds.

A policy decides what to draft. Its result depends on the text, on what its sources would draft and
on what a batch costs, but not on who computes the logits. So a text is recorded once, with the
model's likeliest successors and the draft model's chain at every position, and then played through
the real decode loop, drafters and ``auto`` against a target that only reads the recording. Time is
simulated: a batch costs what a cost curve says, drafting costs what it took when it was measured.

``docs/measure.md`` describes the commands.
"""
