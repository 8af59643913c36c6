"""Estimates: acceptance probabilities learnt from outcomes."""

from __future__ import annotations

import pytest

from speculation.drafting.estimates import Estimates


def test_estimates_learn_from_accepted_and_rejected_drafts() -> None:
    estimates = Estimates((0.5, 0.7))
    assert estimates.chain_probs(range(10), 1.0, 0.2) == pytest.approx([0.5, 0.7, 0.7])
    for _ in range(200):
        estimates.learn(1, accepted=False)
    assert estimates.prob(1) < 0.2
    assert estimates.prob(0) < 0.5  # evidence is shared between kinds
