"""Autoregressive decoding, one token a step: the baseline of every other method."""

from __future__ import annotations

from speculation.drafter import MethodSpec

spec = MethodSpec(name="ar", title="Autoregressive", make=lambda params, resources: None)
