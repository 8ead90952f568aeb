"""A long sample keeps its tokens through every stage, in memory that follows from its size.

Peaks are those that the kernel counted. A bound is computed from sizes (bench/long_sample.py); the part of it that does
not grow with the sample is what an allocator and the libraries keep, so it is argued, and not fitted to a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.bench import long_sample_stages as stages
from mopd_dataplane.bench.calls import apart
from mopd_dataplane.bench.long_sample import bounds, measure
from mopd_dataplane.errors import EngineError

TOKENS = 20_000
DEADLINE_S = 600.0


def test_a_killed_rollout_of_a_long_sample_is_stored_whole(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exit code -9"):
        apart(stages.log_until_killed, str(tmp_path), TOKENS, timeout_s=DEADLINE_S)
    killed = json.loads((tmp_path / "killed.json").read_text())
    recovered: dict[str, Any] = apart(stages.recover_and_finish, str(tmp_path), TOKENS, timeout_s=DEADLINE_S)
    assert recovered["resumed"]
    stored: dict[str, Any] = apart(stages.store_sample, str(tmp_path), TOKENS, timeout_s=DEADLINE_S)
    assert recovered["equal"]
    assert stored["equal"]
    bound = bounds(TOKENS)
    for name, figures in (("token log, to its middle", killed), ("token log, recovered", recovered), ("store", stored)):
        assert figures["peak_bytes"] <= bound[name], name


@pytest.mark.slow
def test_every_stage_keeps_the_tokens_within_its_bound(tmp_path: Path) -> None:
    rows = measure(tmp_path, TOKENS)
    assert [row["stage"] for row in rows] == list(bounds(TOKENS))
    assert [row["stage"] for row in rows if not row["is_equal"]] == []
    over = {row["stage"]: (row["peak_bytes"], row["bound_bytes"]) for row in rows}
    assert {name: sizes for name, sizes in over.items() if sizes[0] > sizes[1]} == {}
