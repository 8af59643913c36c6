"""Autoregressive decoding, one token per step: the baseline for all other methods."""

from __future__ import annotations

from speculation.drafter import BASELINE, MethodSpec

spec = MethodSpec(name=BASELINE, title="Autoregressive", make=lambda params, resources: None)
