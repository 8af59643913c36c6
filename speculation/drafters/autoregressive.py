"""Autoregressive decoding, one token per step: the baseline for all other methods."""

from __future__ import annotations

from speculation.drafter import MethodSpec

spec = MethodSpec(name="ar", title="Autoregressive", make=lambda params, resources: None)
