"""A checkpoint belongs to a plan of its store; one that another run left is refused instead of waited on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mopd_dataplane import Store
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.run.steps.trainer_process import check_cursor
from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position
from mopd_dataplane.train.ranks import Ranks


def save(folder: Path, window: int, window_step: int, digest: str) -> Path:
    module = torch.nn.Linear(2, 2)
    identity = Identity(stage="student", objective={}, plan_digest=digest, snapshot_digest="")
    position = Position(step=3, window=window, window_step=window_step)
    optimizer = torch.optim.SGD(module.parameters())
    Checkpoints(folder, Ranks(0, 1, torch.device("cpu"))).save(position, identity, module, optimizer)
    return folder


def test_no_checkpoint_and_a_recorded_plan_pass(demo_store: Store, tmp_path: Path) -> None:
    check_cursor(demo_store, "student", tmp_path / "none")
    first, second = (demo_store.plan("student", window) for window in (0, 1))
    assert first
    assert second
    check_cursor(demo_store, "student", save(tmp_path / "inside", 1, 2, second.digest))
    check_cursor(demo_store, "student", save(tmp_path / "behind", 1, 0, first.digest))
    check_cursor(demo_store, "student", save(tmp_path / "before", 1, 0, second.digest))


@pytest.mark.parametrize(("window", "step", "digest"), [(0, 1, "other"), (1, 0, "other"), (99, 2, "plan0")])
def test_a_plan_that_is_not_recorded_is_refused(
    demo_store: Store, tmp_path: Path, window: int, step: int, digest: str
) -> None:
    folder = save(tmp_path / "student", window, step, digest)
    with pytest.raises(MismatchError, match=rf"plan {digest}, near window {window}, .* delete the folder"):
        check_cursor(demo_store, "student", folder)
