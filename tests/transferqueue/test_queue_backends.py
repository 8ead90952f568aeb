"""The benchmark that measures a real TransferQueue over this store and over its own memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench.queue_backends import BACKENDS, FIGURES, measure


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_are_measured(backend: str, tmp_path: Path) -> None:
    figures = measure(backend, tmp_path, processes=2, seconds_each=0.5)
    assert tuple(figures) == FIGURES
    assert (figures["backend"], figures["processes"]) == (backend, 2)
    assert 0 < figures["put_p50_ms"] <= figures["put_p99_ms"]
    assert min(figures["trajectories_per_s"], figures["get_mb_per_s"], figures["client_mib"]) > 0
    assert (tmp_path / "store" / "queue-logs").is_dir() == (backend == "MopdStore")
