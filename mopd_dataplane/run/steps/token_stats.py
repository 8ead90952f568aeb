"""Writes the trainer's per-token statistics from its files to the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.token_stats import TokenStats, write_token_stats
from mopd_dataplane.train.token_stats import FoundOfSample, read_stats, stats_files


def record_stats(store: Store, stage: str, folder: Path, *, before: int) -> int:
    """Write the statistics of steps below `before` and remove their files; how many rows are new.

    folder: of the stage's checkpoints. A sample of which a rank's part is missing is left out: its run was killed in
    the middle of the step, and takes the step again.
    """
    files = stats_files(folder, before=before)
    found = [one for group in files for one in read_stats(group)]
    added = write_token_stats(store, [_row(stage, one) for one in _whole(store, found)])
    for group in files:
        for path in group:
            path.unlink(missing_ok=True)
    return added


def _whole(store: Store, found: list[FoundOfSample]) -> list[FoundOfSample]:
    if not found:
        return []
    rows = np.array([one.sample_row for one in found])
    counts = store.take_samples(rows, ["loss_tokens"])["loss_tokens"].to_pylist()
    lengths = [len(next(iter(one.values.values()))) for one in found]
    return [one for one, length, count in zip(found, lengths, counts, strict=True) if length == count]


def _row(stage: str, one: FoundOfSample) -> TokenStats:
    return TokenStats(
        sample_row=one.sample_row, stage=stage, teacher=one.teacher, step=one.step,
        policy_version=one.policy_version, values=one.values,
    )  # fmt: skip
