"""A follower whose peer never moves ends with the command to start."""

from __future__ import annotations

import pytest
from advice import advises

from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.run import follow


def test_a_stall_times_out_and_starts_again_when_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(follow.time, "sleep", lambda seconds: None)
    stall = follow.StallTimeout("mopd score JOB --follow")
    clock[0] += follow.STALL_TIMEOUT_S - 1
    stall.pause()
    stall.renew()
    clock[0] += follow.STALL_TIMEOUT_S - 1
    stall.pause()
    clock[0] += 2
    with advises(" does not go on; start it, then run this command again to continue") as refused:
        stall.pause()
    assert refused.type is DeadlineError
    assert "168 h: mopd score JOB --follow does not go on" in str(refused.value)
    again = follow.StallTimeout("mopd score JOB --follow")
    again.pause()
    clock[0] += follow.STALL_TIMEOUT_S - 1
    again.renew()
    again.pause()
