"""`mopd bench resume` on the tiny model: the saved cache makes every resume exact, and that is measured."""

from __future__ import annotations

import signal
from pathlib import Path

from mopd_dataplane.bench.resume import measure


def test_rates_of_both_treatments(tiny_model: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    rates = measure(tiny_model, samples=24, slots=8, max_new_tokens=24, every=10)
    assert signal.getsignal(signal.SIGTERM) is handler
    killed, stopped = rates["killed"], rates["stopped"]
    assert stopped["exact_rate"] == 1
    assert stopped["same_bits"] == stopped["same_tokens"] == 24
    assert killed["same_tokens"] == 24
    assert killed["same_bits"] < 24
    assert 0 < killed["largest_gap_nat"] < 2e-5
    assert min(killed["interrupted"], stopped["interrupted"]) > 8
    assert killed["mean_length"]["ratio"] == 1
