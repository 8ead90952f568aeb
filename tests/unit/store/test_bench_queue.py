"""The queue's benchmark runs its clients, and its figures are of what they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench import queue
from mopd_dataplane.bench.queue import FIGURES, measure


def test_figures_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "BATCH", 8)
    monkeypatch.setattr(queue, "GETS", 2)
    figures = measure(tmp_path, 2, 0.5)
    assert set(FIGURES) <= set(figures)
    assert 0 < figures["put_p50_ms"] <= figures["put_p99_ms"]
    assert figures["trajectories_per_s"] > 0
    assert figures["raw_per_s"] > 0
    assert figures["get_unfolded_mb_per_s"] > 0
    assert figures["get_folded_mb_per_s"] > 0
    assert 5 < figures["client_mib"] < 60
