"""Choice of the samples that keep per-token statistics, by row id: the same in scoring and in training."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SHARE = 8
"""`sampled` keeps one sample in so many."""


def keeps_stats(mode: str, sample_rows: ArrayLike) -> NDArray[np.bool_]:
    """[n] whether statistics of these rows of `samples` are kept under a mode: off, sampled or full."""
    rows = np.asarray(sample_rows, np.int64)
    if mode != "sampled":
        return np.full(rows.shape, mode == "full")
    with np.errstate(over="ignore"):  # a multiplicative hash: neighbours, such as one group, are not chosen together
        mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    chosen: NDArray[np.bool_] = mixed % np.uint64(SHARE) == 0
    return chosen
