"""Sampling masks: the token ids that top-k and top-p left to draw each token from."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingMasks:
    """Sampling masks of B tokens."""

    sizes: NDArray[np.int32]
    """[B]; 0 says that nothing was cut: the token was drawn from the whole vocabulary"""
    ids: NDArray[np.int32]
    """[sum of sizes] token ids, set after set"""

    def fits(self, needs_mask: NDArray[np.bool_]) -> bool:
        """Whether there is a set for every row of `needs_mask` [B], empty where it is false."""
        whole = self.sizes.dtype.kind in "iu" and self.ids.dtype.kind in "iu"
        if not whole or self.sizes.shape != needs_mask.shape or self.ids.ndim != 1 or (self.sizes < 0).any():
            return False
        return len(self.ids) == int(self.sizes[needs_mask].sum()) == int(self.sizes.sum())

    def holds(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[B] whether each token could be drawn from its set."""
        hits = np.concatenate([[0], np.cumsum(self.ids == np.repeat(tokens, self.sizes))])
        ends = np.cumsum(self.sizes)
        holds: NDArray[np.bool_] = (self.sizes == 0) | (hits[ends] > hits[ends - self.sizes])
        return holds


def sampling_masks_of(inside: NDArray[np.bool_], needs_mask: NDArray[np.bool_]) -> SamplingMasks:
    """Sampling masks of the rows of `needs_mask` [B]; inside [B, V]: the tokens that each row may draw."""
    chosen = inside & needs_mask[:, None]
    sizes = chosen.sum(axis=1, dtype=np.int32)
    uncut = sizes == inside.shape[1]
    chosen[uncut], sizes[uncut] = False, 0
    return SamplingMasks(sizes, np.nonzero(chosen)[1].astype(np.int32))
