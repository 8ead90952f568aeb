"""Checkpoints on a disk: when it gets full inside of one, the error is named and the one before stays the newest; and
which of them stay."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from advice import advises

from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position, latest_checkpoint
from mopd_dataplane.train.newest import name_best, window_ends
from mopd_dataplane.train.ranks import Ranks


def test_a_full_disk_is_named_and_costs_only_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, Ranks.join("cpu"))
    identity = Identity(stage="s", objective={}, plan_digest="p", snapshot_digest="d")
    checkpoints.save(Position(step=1), identity, model, optimizer)

    def full(tensors: Any, file: Path) -> None:
        file.write_bytes(b"torn")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("mopd_dataplane.train.checkpoint.save_file", full)
        with advises(": free some, run again"):
            checkpoints.save(Position(step=2), identity, model, optimizer)
    assert latest_checkpoint(tmp_path) == (Position(step=1), identity)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-00000001"], "the room is back"
    checkpoints.save(Position(step=2), identity, model, optimizer)
    assert latest_checkpoint(tmp_path) == (Position(step=2), identity)


def test_the_best_versions_stay_until_others_are_better(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, Ranks.join("cpu"))
    identity = Identity(stage="s", objective={}, plan_digest="p", snapshot_digest="d")
    best = {1: [1], 2: [1], 3: [3], 4: [3], 5: [3], 6: [3], 7: [7]}
    for window in range(8):
        checkpoints.save(Position(step=window + 1, window=window + 1), identity, model, optimizer)
        name_best(tmp_path, best.get(window + 1, [7]))
        stored = sorted(window_ends(tmp_path))
        last = [version for version in (window, window + 1) if version]
        assert stored == sorted({*last, *best.get(window, [])}), f"after version {window + 1}"
    (tmp_path / "best.json").write_text('{"versions": [')
    checkpoints.save(Position(step=9, window=9), identity, model, optimizer)
    assert sorted(window_ends(tmp_path)) == [8, 9], "a torn file names none"


@pytest.mark.parametrize(("every", "versions"), [(0, [5, 6]), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 5, 6])])
def test_ends_of_windows_stay_as_long_as_asked_for(tmp_path: Path, every: int, versions: list[int]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, Ranks.join("cpu"), every=every)
    identity = Identity(stage="s", objective={}, plan_digest="p", snapshot_digest="d")
    for window in range(6):
        for inside in (1, 2):
            position = Position(step=3 * window + inside, window=window, window_step=inside)
            checkpoints.save(position, identity, model, optimizer)
        checkpoints.save(Position(step=3 * window + 3, window=window + 1), identity, model, optimizer)
    ends = window_ends(tmp_path)
    assert {version: (end.name, end.step) for version, end in ends.items()} == {
        version: (f"step-{3 * version:08d}", 3 * version) for version in versions
    }
    inside = {path.name for path in tmp_path.glob("step-*")} - {end.name for end in ends.values()}
    assert inside == {"step-00000017"}, "and the newest but one, which lies inside of a window"
