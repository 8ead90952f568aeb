"""`mopd bench wal` measures the real log and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench.wal import measure


@pytest.mark.slow
def test_every_figure_is_measured(tmp_path: Path) -> None:
    figures = measure(tmp_path, sequences=8, seconds=0.2)
    for key in ("tokens_per_s", "ack_p50_ms", "ack_p99_ms", "share_of_decode", "raw_write_bytes_per_s"):
        assert figures[key] > 0
    assert figures["ack_p50_ms"] <= figures["ack_p99_ms"]
    assert figures["share_of_decode"] == figures["log_step_ms"] / figures["decode_step_ms"]
    assert sum(figures["fdatasync_ms"].values()) > 0
    assert list(tmp_path.iterdir()) == []
