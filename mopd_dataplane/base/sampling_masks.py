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

    def fits(self, asked: NDArray[np.bool_]) -> bool:
        """Whether there is a set for every row of `asked` [B], empty where it is false."""
        if (
            self.sizes.shape != asked.shape
            or self.ids.ndim != 1
            or {self.sizes.dtype.kind, self.ids.dtype.kind} - {*"iu"}
        ):
            return False
        return bool((self.sizes >= 0).all()) and len(self.ids) == int(self.sizes[asked].sum()) == int(self.sizes.sum())

    def holds(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[B] whether each token could be drawn from its set."""
        hits = np.concatenate([[0], np.cumsum(self.ids == np.repeat(tokens, self.sizes))])
        ends = np.cumsum(self.sizes)
        found: NDArray[np.bool_] = (self.sizes == 0) | (hits[ends] > hits[ends - self.sizes])
        return found


def sampling_masks_of(inside: NDArray[np.bool_], asked: NDArray[np.bool_]) -> SamplingMasks:
    """Sampling masks of the rows that are `asked` for [B]; inside [B, V]: the tokens that each row may draw."""
    kept = inside & asked[:, None]
    sizes = kept.sum(axis=1, dtype=np.int32)
    uncut = sizes == inside.shape[1]
    kept[uncut], sizes[uncut] = False, 0
    return SamplingMasks(sizes, np.nonzero(kept)[1].astype(np.int32))
