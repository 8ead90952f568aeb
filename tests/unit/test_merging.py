"""Merged weights of evidence/merging.py: against sums done by hand, and folders that read as sound."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd_dataplane.base.file_checksums import check_folder, write_checksums

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
import merging

BASE = [1.0, 2.0, 3.0, 4.0, 5.0]
CHANGES = ([0.0, 1.0, 0.0, -8.0, 0.1], [0.0, 2.0, 0.0, 6.0, 0.1], [3.0, 3.0, 0.0, -4.0, 0.1])


def policy(folder: Path, weights: list[float]) -> Path:
    folder.mkdir()
    save_file({"w": torch.tensor(weights)}, folder / "model.safetensors")
    write_checksums(folder)
    return folder


@pytest.mark.parametrize(
    ("merge", "scale", "change"),
    [
        (merging.average, 1.0, [1.0, 2.0, 0.0, -2.0, 0.1]),
        (merging.task_arithmetic, 0.5, [1.5, 3.0, 0.0, -3.0, 0.15]),
        # each keeps its largest change of five: -8, 6, -4; the sign of their sum is theirs that agree
        (merging.ties, 0.5, [0.0, 0.0, 0.0, -3.0, 0.0]),
    ],
)
def test_weights_are_merged_into_a_sound_policy(
    merge: object, scale: float, change: list[float], tmp_path: Path
) -> None:
    base = policy(tmp_path / "base", BASE)
    own = [
        policy(tmp_path / f"specialist{i}", [b + c for b, c in zip(BASE, changes, strict=True)])
        for i, changes in enumerate(CHANGES)
    ]
    assert callable(merge)
    merge(base, own, scale, tmp_path / "merged")
    check_folder(tmp_path / "merged")
    weight = load_file(tmp_path / "merged" / "model.safetensors")["w"]
    torch.testing.assert_close(weight, torch.tensor(BASE) + torch.tensor(change))
