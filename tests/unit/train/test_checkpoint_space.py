"""A disk that gets full inside a checkpoint: a named error, and the checkpoint before stays the newest."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position, latest_checkpoint
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
        with pytest.raises(ResourceError, match=r"no space for a checkpoint in .*: free some, run again"):
            checkpoints.save(Position(step=2), identity, model, optimizer)
    assert latest_checkpoint(tmp_path) == (Position(step=1), identity)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-00000001"], "the room is back"
    checkpoints.save(Position(step=2), identity, model, optimizer)
    assert latest_checkpoint(tmp_path) == (Position(step=2), identity)
