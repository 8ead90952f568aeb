"""`mopd bench wal` measures the real log and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from mopd_dataplane.bench.wal import measure


def test_every_figure_is_measured(tmp_path: Path) -> None:
    found = measure(tmp_path, sequences=8, seconds=0.2)
    for key in ("tokens_per_s", "ack_p50_ms", "ack_p99_ms", "share_of_decode", "raw_write_bytes_per_s"):
        assert found[key] > 0
    assert found["ack_p50_ms"] <= found["ack_p99_ms"]
    assert found["share_of_decode"] == found["log_step_ms"] / found["decode_step_ms"]
    assert sum(found["fdatasync_ms"].values()) > 0
    assert list(tmp_path.iterdir()) == []
