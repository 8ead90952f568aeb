"""The curve of many small commits holds what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench.commits import BATCH, measure
from mopd_dataplane.store.dataset import Store


@pytest.mark.slow
def test_curve_and_sizes(tmp_path: Path) -> None:
    figures = measure(tmp_path, 40)
    assert [point["commits"] for point in figures["curve"]] == list(range(5, 41, 5))
    assert all(value > 0 for point in figures["curve"] for value in point.values())
    assert 0 < figures["row_crc_share"] < 1
    assert 0 < figures["merge_check_share"] < 1  # 33 files were merged
    assert {name: size["files"] for name, size in figures["compacted"].items()} == {"samples": 4, "tokens": 4}
    assert Store.open(tmp_path / "commits").samples(["uid"]).num_rows == 40 * BATCH
