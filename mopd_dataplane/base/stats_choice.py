"""Choice of the samples whose per-token statistics are stored, by row id: the same in scoring and in training."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SHARE = 8
"""The mode `sampled` chooses one sample in this many."""


def keeps_stats(mode: str, sample_rows: ArrayLike) -> NDArray[np.bool_]:
    """Return whether statistics of these rows of `samples` are stored under a mode (off, sampled or full): [n] bool."""
    rows = np.asarray(sample_rows, np.int64)
    if mode != "sampled":
        return np.full(rows.shape, mode == "full")
    with np.errstate(over="ignore"):  # multiplicative hash: spreads the choice over neighbours
        mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    chosen: NDArray[np.bool_] = mixed % np.uint64(SHARE) == 0
    return chosen
