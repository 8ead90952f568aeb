"""A disk that gets full inside a checkpoint: a named error, and the checkpoint before stays the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.train import checkpoint
from mopd_dataplane.train.checkpoint import Checkpoints, Identity, Position
from mopd_dataplane.train.ranks import Ranks


def test_a_full_disk_is_named_and_costs_only_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, Ranks.join("cpu"))
    identity = Identity(stage="s", objective={}, plan_digest="p", snapshot_digest="d")
    checkpoints.save(Position(step=1), identity, model, optimizer)
    real = checkpoint.save_file

    def full(tensors: Any, file: Path) -> None:
        real(tensors, file)
        file.write_bytes(file.read_bytes()[:50])
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(ResourceError, match=r"no space for a checkpoint in .*: free some, run again"):
            checkpoints.save(Position(step=2), identity, model, optimizer)
    assert checkpoints.latest() == (Position(step=1), identity)
    checkpoints.save(Position(step=2), identity, model, optimizer)
    assert checkpoints.latest() == (Position(step=2), identity)
