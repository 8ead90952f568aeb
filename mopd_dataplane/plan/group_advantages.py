"""Outcome rewards of a window's samples, and their advantage over their group."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.errors import MismatchError, require_known

STD_FLOOR = 1e-6
"""Added to the standard deviation, as in common GRPO trainers."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """rewards: [n] f32, NaN for a sample without one. advantages: [n] f32, 0 for a sample without a reward."""

    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]


def group_outcomes(
    rewards: pa.Table,
    rows: NDArray[np.int64],
    groups: pa.ChunkedArray,
    sample_rows: NDArray[np.int64],
    *,
    verifier: str = "",
    divide_by_std: bool = False,
) -> Outcomes:
    """Compute rewards and group-relative advantages of these samples.

    rewards: columns sample_row, verifier, reward. rows: [n] every sample of the store, ascending. groups: [n] the group
    of each. A group is every rewarded sample with one group_id, planned or not, so leaving a sample out of training
    does not change the others' advantages. advantage = reward - mean (DeepSeekMath, eq. 20, without its division unless
    `divide_by_std`, which uses the sample standard deviation); 0 in a group of one.
    Raises MismatchError when several verifiers rewarded one sample of these groups and none is named.
    """
    codes = pc.dictionary_encode(groups).combine_chunks().indices.to_numpy()
    planned = np.searchsorted(rows, sample_rows)
    rewards = rewards.filter(np.isin(rewards["sample_row"].to_numpy(), rows))
    rewarded = np.searchsorted(rows, rewards["sample_row"].to_numpy())
    rewards = rewards.filter(np.isin(codes[rewarded], codes[planned]))
    names = sorted(pc.unique(rewards["verifier"]).to_pylist())
    if verifier:
        require_known(verifier, names, "no rewards by verifier", MismatchError)
        rewards = rewards.filter(pc.equal(rewards["verifier"], verifier))
    elif pc.count_distinct(rewards["sample_row"]).as_py() < len(rewards):
        raise MismatchError(
            f"samples are rewarded by several verifiers: {', '.join(names)}; name one of them in LoadSpec.verifier"
        )
    value = np.full(len(groups), np.nan, dtype=np.float64)
    value[np.searchsorted(rows, rewards["sample_row"].to_numpy())] = rewards["reward"].to_numpy()
    has = ~np.isnan(value)
    size = int(codes.max(initial=-1)) + 1
    count = np.bincount(codes[has], minlength=size)
    mean = np.bincount(codes[has], weights=value[has], minlength=size) / np.maximum(count, 1)
    centred = np.where(has, value - mean[codes], 0.0)
    if divide_by_std:
        squares = np.bincount(codes, weights=centred**2, minlength=size)
        centred = centred / (np.sqrt(squares / np.maximum(count - 1, 1)) + STD_FLOOR)[codes]
    return Outcomes(value[planned].astype(np.float32), centred[planned].astype(np.float32))
